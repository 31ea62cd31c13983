"""Linear layers whose weights also lie in the order in which the CPU's kernels read them.

A product of few rows takes as long as reading its weights. oneDNN reads a matrix that was reordered for it once about
twice as fast as one that it finds row by row, and computes the same bits: so the plain product serves as this one's
reference, and a forward may use either. Costs a second copy of the weights.

Knows no target and no head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

ROWS = 32  # the row count that the order is chosen for; others gain as much
SMALLEST = 4096  # numbers of a matrix; smaller products are not oneDNN's in the plain form either


class PackedLinear(nn.Linear):
    """A linear layer that reads its packed copy wherever no gradient is wanted; the weight itself stays.

    The copy is made in the first such forward, and again when the weight was written or moved.
    """

    _packed: Tensor | None
    _of: tuple[int, int] | None  # address and version of the weight that was packed

    @classmethod
    def like(cls, linear: nn.Linear) -> PackedLinear:
        """A layer of the very same parameters."""
        made = cls(linear.in_features, linear.out_features, bias=False, device="meta")
        made.weight, made.bias = linear.weight, linear.bias
        made._packed = made._of = None
        return made.train(linear.training)

    def forward(self, rows: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return super().forward(rows)
        if self._of != (self.weight.data_ptr(), self.weight._version):
            self._pack()
        if self._packed is None:
            return super().forward(rows)
        out: Tensor = torch.ops.mkldnn._linear_pointwise.default(
            rows, self._packed, self.bias, "none", [], ""
        )
        return out

    def _pack(self) -> None:
        """Pack the weight as it is now; one that gains nothing (cast to float32) is left as it is."""
        self._of = (self.weight.data_ptr(), self.weight._version)
        self._packed = None
        if packable(self):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight, ROWS)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_packed": None, "_of": None}  # a copy packs its own weight


def pack_linears(module: nn.Module) -> None:
    """Let every linear layer below `module` that gains from it read packed weights. Names of parameters stay."""
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if type(child) is nn.Linear and packable(child) and not _hooked(child):
                setattr(parent, name, PackedLinear.like(child))


def packable(linear: nn.Linear) -> bool:
    """Whether packing a layer's weight as it is now gains anything and changes no bit."""
    weight = linear.weight
    return (
        weight.dtype == torch.bfloat16
        and weight.device.type == "cpu"
        and type(weight) is nn.Parameter  # no shard of a tensor-parallel one
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
