"""Loaded at interpreter start: declares two torchvision operators that a CPU build of torch lacks.

The torchvision that SGLang pins is built for CUDA; its operator library does not load beside a CPU torch,
and its Python code then fails for want of their schemas.
"""

from __future__ import annotations

import importlib.abc
import sys
from typing import Any


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    """Finds nothing; sees torchvision come."""

    library: Any = None

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name != "torchvision" or self.library is not None:
            return
        import torch

        type(self).library = library = torch.library.Library("torchvision", "DEF")
        for operator in ("nms(Tensor dets, Tensor scores,", "qnms(Tensor dets, Tensor scores,"):
            library.define(f"{operator} float iou_threshold) -> Tensor")


sys.meta_path.insert(0, _BeforeTorchvision())
