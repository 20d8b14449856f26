"""Weights in oneDNN's own blocked layout, for bfloat16 linear layers on the CPU.

PyTorch's linear puts the weight into that layout at every call, which costs more than the product itself when
there are few rows. A packed copy gives the same bits in about half of the time, for the price of the memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class PackedWeight:
    """A weight ``[out, in]`` in oneDNN's layout; only :func:`linear` can use it."""

    __slots__ = ("data",)

    def __init__(self, weight: Tensor) -> None:
        self.data = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), None)

    def __deepcopy__(self, memo: Any) -> PackedWeight:
        return self  # never written to


def can_pack(weight: Tensor) -> bool:
    """Whether packing is possible and pays: bfloat16 on a CPU whose oneDNN knows it."""
    return (
        weight.dtype == torch.bfloat16
        and weight.device.type == "cpu"
        and weight.numel() > 0
        and torch.backends.mkldnn.is_available()
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def pack(weight: Tensor) -> Tensor | PackedWeight:
    """The weight packed, or as it is where packing is not possible."""
    if not can_pack(weight):
        return weight
    with torch.inference_mode(False), torch.no_grad():
        return PackedWeight(weight)


def linear(x: Tensor, weight: Tensor | PackedWeight) -> Tensor:
    """``x [..., in] @ weight.T`` for a weight from :func:`pack` (no gradient) or a plain one."""
    if not isinstance(weight, PackedWeight):
        return F.linear(x, weight)
    return torch.ops.mkldnn._linear_pointwise(x, weight.data, None, "none", [], "")


_PACKS: WeakKeyDictionary[nn.Module, tuple[tuple[int, int], PackedWeight]] = WeakKeyDictionary()


def pack_linears(modules: list[nn.Module]) -> Callable[[], None]:
    """Let the bias-free or biased ``nn.Linear`` layers inside ``modules`` use packed weights; returns the
    undo.

    Packs are kept for as long as the layers live, so that doing it again is cheap. The weights must not
    change meanwhile.
    """
    changed: list[nn.Linear] = []
    for root in modules:
        for layer in root.modules():
            if type(layer) is not nn.Linear or not can_pack(layer.weight) or "forward" in layer.__dict__:
                continue
            key = (layer.weight.data_ptr(), 0 if layer.weight.is_inference() else layer.weight._version)
            kept = _PACKS.get(layer)
            if kept is None or kept[0] != key:
                packed = pack(layer.weight)
                assert isinstance(packed, PackedWeight)
                kept = _PACKS[layer] = (key, packed)
            layer.forward = _forward(kept[1].data, layer.bias)  # type: ignore[method-assign, assignment]
            changed.append(layer)

    def undo() -> None:
        for layer in changed:
            layer.__dict__.pop("forward", None)
        changed.clear()

    return undo


def _forward(data: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    run: Any = torch.ops.mkldnn._linear_pointwise.default

    def forward(x: Tensor) -> Tensor:
        return run(x, data, bias, "none", [], "")

    return forward
