"""The launch command of an SGLang replica with our L3, and what SGLang makes of the flags beside it.

Decides text only: nothing is started, and SGLang need not be installed.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hicache.errors import ConfigError
from hicache.integrations.sglang.radix.backend import NAME as RADIX
from hicache.integrations.sglang.remarks import Note, remarks

MODULE, CLASS = "hicache.integrations.sglang.storage", "HiCacheStorageBackend"
LINKER_MODULE, LINKER_CLASS = "hicache.integrations.sglang.linker", "HiCacheLinker"


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """What the command is made from. `flags` are the user's own, as SGLang takes them.

    `linker` loads from L3 to the device without a host tier; `adaptive` evicts by our policy.
    """

    model: str
    weight_version: str
    backend: str = "grpc"
    options: Mapping[str, object]
    model_id: str = ""
    flags: Sequence[str] = ()
    linker: bool = False
    adaptive: bool = False


@dataclass(frozen=True, slots=True)
class Launch:
    """The command, and what to know about it."""

    command: tuple[str, ...]
    extra_config: Mapping[str, object]
    notes: tuple[Note, ...]

    def shell(self) -> str:
        """Return the command for a shell, one flag a line."""
        lines = [shlex.join(self.command[:3])]
        for word in self.command[3:]:
            if word.startswith("--"):
                lines.append(word)
            else:
                lines[-1] += f" {shlex.quote(word)}"
        return " \\\n    ".join(lines)


_PAGES = {"page-size": "64"}
_TIERS = {
    "hicache-ratio": "2",
    "hicache-io-backend": "direct",
    "hicache-mem-layout": "page_first_direct",
    "hicache-write-policy": "write_through",
    "hicache-storage-prefetch-policy": "timeout",
}
_OURS = (
    *("hicache-storage-backend", "hicache-storage-backend-extra-config"),
    *("unified-cache-external-linker-backend", "unified-cache-external-linker-config"),
)


def plan(replica: Replica) -> Launch:
    """Return the command that starts this replica with our L3.

    Raises ConfigError for flags that contradict it.
    """
    if not replica.weight_version:
        raise ConfigError("the weight version is needed: any text that changes when the weights do")
    given = read_flags(replica.flags)
    for name in _OURS:
        if name in given:
            raise ConfigError(f"--{name} is what this command writes; leave it out")
    if "enable-hicache" in given:  # an alias
        given = {"enable-hierarchical-cache": given.pop("enable-hicache"), **given}
    extra = _extra_config(replica)
    if replica.linker:
        flags = {"enable-unified-cache-external-linker": "", **_PAGES, **given}
        config = {"linker": LINKER_CLASS, "linker_module_path": LINKER_MODULE, "linker_extra_config": extra}
        last = ["--unified-cache-external-linker-backend", "dynamic"]
        last += ["--unified-cache-external-linker-config", json.dumps(config)]
    else:
        flags = {"enable-hierarchical-cache": "", **_PAGES, **_TIERS, **given}
        if "hicache-size" in given and "hicache-ratio" not in given:
            del flags["hicache-ratio"]
        names = {"backend_name": "hicache", "module_path": MODULE, "class_name": CLASS, "interface_v1": 1}
        extra = {**names, **extra}
        last = ["--hicache-storage-backend", "dynamic"]
        last += ["--hicache-storage-backend-extra-config", json.dumps(extra)]
    if replica.adaptive and flags.setdefault("radix-cache-backend", RADIX) != RADIX:
        raise ConfigError(
            f"--radix-cache-backend {flags['radix-cache-backend']} is another cache than --adaptive asks for"
        )
    command = ["python", "-m", "sglang.launch_server", "--model-path", replica.model]
    for name, value in flags.items():
        command += [f"--{name}", value] if value else [f"--{name}"]
    return Launch((*command, *last), extra, remarks(flags))


def _extra_config(replica: Replica) -> dict[str, object]:
    extra: dict[str, object] = {"weight_version": replica.weight_version}
    if replica.backend != "grpc":
        extra["backend"] = replica.backend
    if replica.model_id:
        extra["model_id"] = replica.model_id
    return {**extra, **replica.options}


def read_flags(words: Sequence[str]) -> dict[str, str]:
    """Return `--name value`, `--name=value` and `--switch` words by name.

    Raises ConfigError for a word that belongs to no flag.
    """
    flags: dict[str, str] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
            flags[name] = value
        elif name and not flags[name]:
            flags[name] = word
        else:
            raise ConfigError(f"{word!r} belongs to no flag; SGLang's flags follow --, as in -- --tp-size 2")
    return flags
