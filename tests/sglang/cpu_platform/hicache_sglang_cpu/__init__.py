"""An SGLang platform for a machine without a GPU. Only for tests: correct, and slow."""

from __future__ import annotations


def platform() -> str:
    """Name the platform class; SGLang imports it."""
    return "hicache_sglang_cpu.platform.PlainTorch"


def plugin() -> None:
    """Put torch in place of kernels, in every process of SGLang."""
    from hicache_sglang_cpu import attention, copies

    copies.install()
    attention.install()
