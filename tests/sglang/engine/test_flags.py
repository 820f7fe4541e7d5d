"""What `hicache sglang-flags` says of flags against what SGLang's own argument resolution does with them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hicache.integrations.sglang.launch import Replica, plan, read_flags
from hicache.integrations.sglang.remarks import Effect
from hicache.testing.sglang_driver import reported

_RESOLVE = """
import json, sys
from sglang.srt.arg_groups.hicache_hook import handle_hicache
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.server_args import ServerArgs
answers = []
for fields in json.loads(sys.argv[1]):
    try:
        arguments = ServerArgs(model_path="dummy", device="cpu", **fields)
        handle_hicache(arguments)
        view = resolving_view(arguments)
        answers.append({name: getattr(view, name) for name in fields})
    except (ValueError, NotImplementedError) as error:
        answers.append(str(error))
print(json.dumps(answers))
"""

SETTINGS = [
    "",
    "--hicache-io-backend kernel",
    "--hicache-mem-layout page_first",
    "--hicache-mem-layout page_first --hicache-io-backend kernel",
    "--hicache-mem-layout layer_first",
    "--hicache-mem-layout page_head --hicache-io-backend kernel",
    "--hicache-host-memory-mode buffer_only --hicache-write-policy write_back",
    "--enable-unified-memory",
    "--enable-unified-cache-external-linker",
    "linker",
    "linker --radix-cache-backend hicache",
    "linker --disable-radix-cache",
    "linker --enable-hierarchical-cache",
    "linker --enable-linker-mla-dedup",
    "adaptive",
]
_READ = (
    *("hicache-mem-layout", "hicache-io-backend", "hicache-write-policy", "hicache-host-memory-mode"),
    *("enable-unified-memory", "enable-unified-cache-external-linker", "enable-hierarchical-cache"),
    *("radix-cache-backend", "disable-radix-cache", "enable-linker-mla-dedup", "hicache-storage-backend"),
    *("unified-cache-external-linker-backend", "hicache-ratio"),
)


def replica(setting: str) -> Replica:
    """The replica of a setting: flags, behind `linker` or `adaptive` where they are for those."""
    kind, _, flags = setting.partition(" ") if setting[:1] != "-" else ("", "", setting)
    return Replica(
        model="m",
        weight_version="1",
        options={},
        flags=flags.split(),
        linker=kind == "linker",
        adaptive=kind == "adaptive",
    )


def asked(setting: str) -> dict[str, Any]:
    """The fields of SGLang's arguments that the printed command sets."""
    command = plan(replica(setting)).command
    flags = read_flags(command[5:])
    fields: dict[str, Any] = {name.replace("-", "_"): flags[name] or True for name in _READ if name in flags}
    if "hicache_ratio" in fields:
        fields["hicache_ratio"] = float(fields["hicache_ratio"])
    config = flags.get("unified-cache-external-linker-config")
    return {**fields, "unified_cache_external_linker_config": json.loads(config)} if config else fields


@pytest.fixture(scope="module")
def resolved() -> list[Any]:
    """SGLang's answer to every setting: the fields as it would use them, or why it refuses."""
    fields = json.dumps([asked(setting) for setting in SETTINGS])
    answers: list[Any] = reported("-c", _RESOLVE, fields)
    return answers


@pytest.mark.parametrize("setting", SETTINGS)
def test_what_sglang_rewrites_and_refuses_is_said_and_nothing_else(resolved: list[Any], setting: str) -> None:
    """A remark that a new SGLang made wrong sends operators after a problem they do not have."""
    answer = resolved[SETTINGS.index(setting)]
    notes = plan(replica(setting)).notes
    effects = {note.effect for note in notes} - {Effect.MEANS}
    if isinstance(answer, str):
        assert effects == {Effect.REFUSES}, answer
        return
    before = asked(setting)
    changed = {name: value for name, value in answer.items() if value != before[name]}
    assert effects == ({Effect.REWRITES} if changed else set()), changed
    said = " ".join(note.text for note in notes)
    for name, value in changed.items():
        assert f"--{name.replace('_', '-')} {value}" in said
