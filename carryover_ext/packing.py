"""Weights laid out anew for linear layers on the CPU that have few rows, as decoding and drafting have.

bfloat16: oneDNN's own blocked layout. PyTorch's linear puts the weight into it at every call, which costs
more than the product itself when there are few rows; a packed copy gives the same bits in about half of the
time.

float32: FBGEMM's layout of float16 weights, for weights that float16 holds, next to nothing aside (those of a
bfloat16 checkpoint read as float32 are): half of the bytes, products and sums in float32. This is how a CPU
without bfloat16 instructions runs a bfloat16 model: PyTorch's own bfloat16 kernels take eight times as long
there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# A rounding is let pass next to zero alone (below 2^-16), where float16 numbers are 2^-24 apart, and where it
# is nothing beside the largest weight.
ROUNDING, OF_LARGEST = 2.0**-25, 2.0**-16


def _has_bf16() -> bool:
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def fast_dtype(device: str | torch.device | None = None) -> torch.dtype:
    """The dtype in which linear layers run fastest: bfloat16 on a GPU and on a CPU whose oneDNN knows it,
    float32 on other CPUs (x86 without AVX-512). ``device`` None: the GPU, where there is one.
    """
    gpu = torch.cuda.is_available() if device is None else torch.device(device).type != "cpu"
    return torch.bfloat16 if gpu or _has_bf16() else torch.float32


def dtype_name(name: str, device: str | torch.device | None = None) -> str:
    """``name``, or for "auto" that of :func:`fast_dtype`."""
    return str(fast_dtype(device)).removeprefix("torch.") if name == "auto" else name


def _is_half(weight: Tensor) -> bool:
    """Whether float16 holds every number of ``weight``, but for what is next to nothing."""
    bound = (torch.linalg.vector_norm(weight, torch.inf) * OF_LARGEST).clamp(max=ROUNDING)

    def error(rows: Tensor) -> Tensor:  # NaN where a number is not finite
        return rows.half().float().sub_(rows).abs_().max()

    return all(bool(error(rows) <= bound) for rows in weight.split(max(1, (1 << 20) // weight.shape[1])))


class PackedWeight:
    """A weight ``[out, in]`` in a layout of its own, with a bias ``[out]`` or none: called with ``x [...,
    in]`` it gives ``x @ weight.T + bias``, without a gradient."""

    __slots__ = ("_run",)

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        weight = weight.detach().contiguous()
        if weight.dtype == torch.bfloat16:
            data = torch.ops.mkldnn._reorder_linear_weight(weight, None)
            blocked: Any = torch.ops.mkldnn._linear_pointwise.default
            self._run: Callable[[Tensor], Tensor] = lambda x: blocked(x, data, bias, "none", [], "")
        else:
            half = torch.ops.quantized.linear_prepack_fp16(weight, None if bias is None else bias.detach())
            product: Any = torch.ops.quantized.linear_dynamic_fp16.default
            self._run = lambda x: product(x, half)

    def __call__(self, x: Tensor) -> Tensor:
        return self._run(x)

    def __deepcopy__(self, memo: Any) -> PackedWeight:
        return self  # never written to


def can_pack(weight: Tensor) -> bool:
    """Whether packing is possible and pays: on a CPU, bfloat16 that oneDNN knows, or float32 of no more
    digits than float16 has, where there is FBGEMM (x86 with AVX2)."""
    if weight.device.type != "cpu" or weight.dim() != 2 or weight.numel() == 0:
        return False
    if weight.dtype == torch.bfloat16:
        return _has_bf16()
    engines = torch.backends.quantized.supported_engines
    return weight.dtype == torch.float32 and "fbgemm" in engines and _is_half(weight.detach())


def pack(weight: Tensor, bias: Tensor | None = None) -> Tensor | PackedWeight:
    """The weight packed, with the bias, or as it is where packing is not possible."""
    if not can_pack(weight):
        return weight
    with torch.inference_mode(False), torch.no_grad():
        return PackedWeight(weight, bias)


def linear(x: Tensor, weight: Tensor | PackedWeight) -> Tensor:
    """``x [..., in] @ weight.T`` for a weight from :func:`pack` (no gradient) or a plain one."""
    return weight(x) if isinstance(weight, PackedWeight) else F.linear(x, weight)


def content(tensor: Tensor) -> tuple[int, int]:
    """Changes when the tensor is another one or was written to (inference tensors do not count that)."""
    return tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version


def fingerprint(tensor: Tensor) -> int:
    """A hash of about a thousand numbers of a tensor on the CPU (0 elsewhere): shows what :func:`content`
    does not, writes through ``.data``, as merging an adapter does, and another tensor at the same address."""
    if tensor.device.type != "cpu" or tensor.numel() == 0:
        return 0
    step = tensor.numel() // 1024 | 1  # odd, so that it does not stay in a few columns
    return hash(tensor.detach().reshape(-1)[::step].contiguous().view(torch.uint8).numpy().tobytes())


_Key = tuple[tuple[int, int, int] | None, ...]
_PACKS: WeakKeyDictionary[nn.Module, tuple[_Key, PackedWeight | None]] = WeakKeyDictionary()


def pack_linears(modules: list[nn.Module]) -> Callable[[], None]:
    """Let the bias-free or biased ``nn.Linear`` layers inside ``modules`` use packed weights; returns the
    undo.

    Packs are kept for as long as the layers live, so that doing it again is cheap, and made anew where the
    weights have changed since. Until the undo they must not change.
    """
    changed: list[nn.Linear] = []
    for root in modules:
        for layer in root.modules():
            if type(layer) is not nn.Linear or "forward" in layer.__dict__:
                continue
            key = tuple(
                None if x is None else (*content(x), fingerprint(x)) for x in (layer.weight, layer.bias)
            )
            kept = _PACKS.get(layer)
            if kept is None or kept[0] != key:
                packed = pack(layer.weight, layer.bias)
                kept = _PACKS[layer] = (key, packed if isinstance(packed, PackedWeight) else None)
            if kept[1] is not None:
                layer.forward = kept[1]  # type: ignore[method-assign, assignment]
                changed.append(layer)

    def undo() -> None:
        for layer in changed:
            layer.__dict__.pop("forward", None)
        changed.clear()

    return undo
