"""Server settings of SGLang that change the bytes of a page and are seen nowhere else."""

from __future__ import annotations

from collections.abc import Mapping

NAMES = ("json_model_override_args", "kv_cache_dtype", "quantization", "quantization_param_path", "revision")


def server_facts() -> Mapping[str, str]:
    """Return those that are set, by name; nothing outside a server."""
    # Heavy, and only meaningful once a server has published its arguments.
    from sglang.srt.runtime_context import get_server_args  # noqa: PLC0415

    try:
        arguments = get_server_args()
    except (RuntimeError, ValueError, AttributeError):
        return {}
    facts = {name: str(getattr(arguments, name, None) or "") for name in NAMES}
    return {name: value for name, value in facts.items() if value not in ("", "{}", "auto")}
