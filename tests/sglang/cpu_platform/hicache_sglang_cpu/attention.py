"""Attention of models with sliding windows on torch_native."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any


def install() -> None:
    """Let models that refuse torch_native have it as `triton`, and make it read window pools rightly."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    ATTENTION_BACKENDS["triton"] = ATTENTION_BACKENDS["torch_native"]
    for name in ("_run_sdpa_forward_extend", "_run_sdpa_forward_decode"):
        setattr(TorchNativeAttnBackend, name, _in_window_slots(getattr(TorchNativeAttnBackend, name)))


def _in_window_slots(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Gather a window layer at the slots of its own pool, where it was written, not of the full one."""
    signature = inspect.signature(forward)

    @functools.wraps(forward)
    def inner(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = signature.bind(self, *args, **kwargs)
        call.apply_defaults()
        window = call.arguments.get("sliding_window_size")
        if self.use_sliding_window_kv_pool and window is not None and window >= 0:
            slots = call.arguments["req_to_token"].long()
            call.arguments["req_to_token"] = self.token_to_kv_pool.translate_loc_from_full_to_swa(slots)
        return forward(*call.args, **call.kwargs)

    return inner
