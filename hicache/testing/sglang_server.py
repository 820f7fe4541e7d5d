"""Real `sglang.launch_server` processes on a CPU with small random models. Needs the environment of
`make sglang-venv`.

Decides how they are started, asked and ended; the plugin in tests/sglang/cpu_platform makes them run there.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hicache.testing.services import Service

START_S = 300.0
REQUEST_S = 120.0
ADMIN_KEY = "admin"

_MAKE_MODEL = """
import sys, torch, transformers
kind, folder = sys.argv[1:]
torch.manual_seed(3)
common = dict(vocab_size=512, hidden_size=128, intermediate_size=256, num_attention_heads=4, head_dim=32,
              num_key_value_heads=2, max_position_embeddings=8192, torch_dtype="bfloat16")
if kind == "gemma4":
    windows = dict(layer_types=["sliding_attention"] * 5 + ["full_attention"], sliding_window=128)
    others = dict(num_global_key_value_heads=2, global_head_dim=32, num_kv_shared_layers=0)
    others |= dict(hidden_size_per_layer_input=0, vocab_size_per_layer_input=512)
    config = transformers.Gemma4TextConfig(num_hidden_layers=6, **windows, **others, **common)
    model = transformers.Gemma4ForCausalLM(config)
else:
    config, model = {"llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
                     "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM)}[kind]
    model = model(config(num_hidden_layers=2, **common))
model.to(torch.bfloat16).save_pretrained(folder)
"""


def make_model(kind: str, folder: Path) -> Path:
    """Save a small random model of a kind (llama, qwen3, gemma4), the same bytes every time."""
    command = [sys.executable, "-c", _MAKE_MODEL, kind, str(folder)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    return folder


@dataclass(frozen=True, slots=True)
class Reply:
    """What `/generate` answered. Tokens of the prompt by the tier that had them."""

    output_ids: tuple[int, ...]
    device: int
    host: int
    storage: int

    @property
    def cached(self) -> int:
        return self.device + self.host + self.storage


class SglangServer(Service):
    """One server; `arguments` are further flags, `environment` further variables."""

    executable = "sglang"

    def __init__(
        self,
        directory: Path,
        model: Path,
        *,
        extra_config: Mapping[str, object],
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(directory, arguments=arguments)
        self.model = model
        self._extra_config = extra_config
        self.environment = dict(environment or {})

    def _command(self) -> list[str]:
        return [
            *(sys.executable, "-m", "sglang.launch_server", "--model-path", str(self.model)),
            *("--served-model-name", self.model.name, "--port", str(self.port), "--device", "cpu"),
            *("--skip-tokenizer-init", "--skip-server-warmup", "--attention-backend", "torch_native"),
            *("--max-total-tokens", "8192", "--max-running-requests", "8", "--disable-overlap-schedule"),
            *("--random-seed", "1", "--admin-api-key", ADMIN_KEY, "--page-size", "64"),
            *("--enable-hierarchical-cache", "--hicache-ratio", "2", "--hicache-io-backend", "direct"),
            *("--hicache-mem-layout", "page_first_direct", "--hicache-storage-backend", "dynamic"),
            *("--hicache-storage-backend-extra-config", json.dumps(self._extra_config)),
        ]

    def _environment(self) -> dict[str, str]:
        return {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **self.environment}

    def _accepts(self) -> bool:
        try:
            return self.call("GET", "/model_info", timeout_s=2.0)[0] == 200
        except OSError:
            return False

    def _end(self, how: signal.Signals, *, timeout_s: float) -> None:
        """End all of its processes: the scheduler and the others are children in its session."""
        process = self._process
        super()._end(how, timeout_s=timeout_s)
        if process is not None:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                return

    def call(
        self, method: str, path: str, body: object = None, *, timeout_s: float = REQUEST_S
    ) -> tuple[int, str]:
        """Return status and text. Raises OSError if nobody answers."""
        request = urllib.request.Request(
            f"http://{self.address}{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json", "Authorization": f"Bearer {ADMIN_KEY}"},
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as reply:
                return reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def generate(self, prompt: Sequence[int], *, new_tokens: int = 16) -> Reply:
        """Complete a prompt greedily. Raises AssertionError with the answer if that failed."""
        sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
        status, text = self.call(
            "POST", "/generate", {"input_ids": list(prompt), "sampling_params": sampling}
        )
        assert status == 200, text
        answer: dict[str, Any] = json.loads(text)
        details = answer["meta_info"].get("cached_tokens_details") or {}
        return Reply(
            output_ids=tuple(answer["output_ids"]),
            device=details.get("device", 0),
            host=details.get("host", 0),
            storage=details.get("storage", 0),
        )

    def flush(self) -> None:
        """Empty L1 and L2, as soon as the server is idle."""
        deadline = time.monotonic() + REQUEST_S
        while self.call("POST", "/flush_cache")[0] != 200:
            assert time.monotonic() < deadline, self.log[-2000:]
            time.sleep(0.05)
