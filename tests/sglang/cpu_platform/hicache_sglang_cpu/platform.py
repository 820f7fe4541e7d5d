"""What SGLang asks a platform for."""

from __future__ import annotations

from typing import ClassVar

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform


class PlainTorch(CpuDeviceMixin, SRTPlatform):
    """The CPU with torch's own operators."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    capabilities: ClassVar[PlatformCapabilities] = PlatformCapabilities()

    def get_dispatch_key_name(self) -> str:
        return "native"

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def is_pin_memory_available(self, device: object = None) -> bool:
        return False
