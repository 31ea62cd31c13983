"""Linear layers whose weights also lie in the order in which the CPU's kernels read them.

A product of few rows takes as long as reading its weights. oneDNN reads a matrix that was reordered for it once about
twice as fast as one that it finds row by row, and computes the same bits: so the plain product serves as this one's
reference, and a forward may use either. Costs a second copy of the weights.

Projections of the same rows (query, key and value; gate and up) are one product: model code asks for one after the
other, the first of them computes all.

Knows no target and no head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

ROWS = 32  # the row count that the order is chosen for; others gain as much
SMALLEST = 4096  # numbers of a matrix; smaller products are not oneDNN's in the plain form either
TOGETHER = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
)  # children that read the same rows
Version = tuple[int, int]  # address and version of a weight


class PackedLinear(nn.Linear):
    """A linear layer that reads its packed copy wherever no gradient is wanted; the weight itself stays.

    The copy is made in the first such forward, and again when the weight was written or moved.
    """

    _product: _Product | None
    _shared: _Shared | None

    @classmethod
    def like(cls, linear: nn.Linear) -> PackedLinear:
        """A layer of the very same parameters."""
        made = cls(linear.in_features, linear.out_features, bias=False, device="meta")
        made.weight, made.bias = linear.weight, linear.bias
        made._product = made._shared = None
        return made.train(linear.training)

    def forward(self, rows: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return super().forward(rows)
        shared = None if self._shared is None else self._shared.answer(self, rows)
        if shared is not None:
            return shared
        if self._product is None or self._product.stale():
            self._product = _Product([self])
        out = self._product(rows)
        return super().forward(rows) if out is None else out

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_product": None, "_shared": None}  # a copy packs its own weight


class _Product:
    """The packed weights of one layer or several, as they were when this was made."""

    def __init__(self, layers: Sequence[PackedLinear]) -> None:
        self.layers = layers
        self.versions = [_version(layer.weight) for layer in layers]
        self.packed: Tensor | None = None
        self.bias: Tensor | None = None
        if all(packable(layer) for layer in layers):
            whole = torch.cat(tuple(layer.weight for layer in layers))
            self.packed = torch.ops.mkldnn._reorder_linear_weight(whole, ROWS)
            biases = tuple(layer.bias for layer in layers if layer.bias is not None)
            self.bias = torch.cat(biases) if biases else None

    def stale(self) -> bool:
        return self.versions != [_version(layer.weight) for layer in self.layers]

    def __call__(self, rows: Tensor) -> Tensor | None:
        """The layers' outputs side by side; None where they gain nothing (cast to float32, for example)."""
        if self.packed is None:
            return None
        out: Tensor = torch.ops.mkldnn._linear_pointwise.default(
            rows, self.packed, self.bias, "none", [], ""
        )
        return out


class _Shared:
    """Layers that are asked about the same rows one after the other."""

    def __init__(self, layers: Sequence[PackedLinear]) -> None:
        self.layers = layers
        self.product: _Product | None = None
        self.rows: Tensor | None = None
        self.outputs: dict[PackedLinear, Tensor] = {}

    def answer(self, layer: PackedLinear, rows: Tensor) -> Tensor | None:
        """The layer's output; None if it is not asked in its turn about the rows that the first one was."""
        if layer is self.layers[0]:
            self._compute(rows)
        out = self.outputs.pop(layer, None) if rows is self.rows else None
        if not self.outputs:
            self.rows = None
        return out

    def _compute(self, rows: Tensor) -> None:
        if self.product is None or self.product.stale():
            self.product = _Product(self.layers)
        out = self.product(rows)
        self.rows, self.outputs = rows, {}
        if out is not None:
            parts = out.split([layer.out_features for layer in self.layers], dim=-1)
            self.outputs = dict(zip(self.layers, parts, strict=True))


def pack_linears(module: nn.Module) -> None:
    """Let every linear layer below `module` that gains from it read packed weights. Names of parameters stay."""
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if type(child) is nn.Linear and packable(child) and not _hooked(child):
                setattr(parent, name, PackedLinear.like(child))
        for names in TOGETHER:
            _share([child for name, child in parent.named_children() if name in names], len(names))


def _share(layers: Sequence[nn.Module], wanted: int) -> None:
    """Let layers answer together, if all are there and alike."""
    packed = [layer for layer in layers if isinstance(layer, PackedLinear)]
    kinds = {(layer.in_features, layer.bias is None) for layer in packed}
    if len(packed) == wanted and len(kinds) == 1:
        shared = _Shared(packed)
        for layer in packed:
            layer._shared = shared


def packable(linear: nn.Linear) -> bool:
    """Whether packing a layer's weight as it is now gains anything and changes no bit."""
    weight = linear.weight
    return (
        weight.dtype == torch.bfloat16
        and weight.device.type == "cpu"
        and type(weight) is nn.Parameter  # no shard of a tensor-parallel one
        and not weight.is_inference()  # nobody counts how often it is written
        and weight.numel() >= SMALLEST
        and _has_kernels()
    )


def _hooked(module: nn.Module) -> bool:
    """Whether a library has put itself around a module's forward: accelerate for offloading, for example."""
    return "forward" in vars(module) or bool(module._forward_hooks or module._forward_pre_hooks)


def _has_kernels() -> bool:
    return torch.backends.mkldnn.is_available() and bool(
        torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def _version(weight: Tensor) -> Version:
    """Of a weight that is not packed, since nobody counts its versions, always the same."""
    return weight.data_ptr(), -1 if weight.is_inference() else weight._version
