"""What a serving layout is: which heads it holds, its tensors and its config.json, and what an engine makes of them.

One file per layout; `formats.LAYOUTS` lists them. Knows no layout and no run folder.

Shapes: T rows, D hidden width, V the target's vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from mtp_train.core.errors import UserError
from mtp_train.core.provenance import read_json, write_json
from mtp_train.export.files import CONFIG, TENSORS, read_weights
from mtp_train.heads.base import DraftHead
from mtp_train.models.target import Target
from mtp_train.store.tensor_files import save_tensors

# vLLM takes the method from these in the head's path, unless it was asked for `eagle` or `eagle3`.
METHOD_WORDS = ("eagle-", "eagle3", "dflash", "dspark")


@dataclass(frozen=True)
class Serving:
    """How one engine serves a folder.

    Attributes:
        engine: its name and what is asked of it.
        version: the one that was tried or read.
        seen: whether it was run; else the commands were taken from its source.
        how: Markdown, commands in fences.
    """

    engine: str
    version: str
    seen: bool
    how: str


@dataclass(frozen=True)
class Chain:
    """A text and its states, for a chain of draft steps that begins at its last row. In float32 on the CPU.

    Attributes:
        token_N: int64 [T + steps]: the text of rows 0 .. T-1, and the drafts after it.
        states: by name, [T, D] each.
        start: position of row 0.
        steps: draft steps.
        target: for its embeddings and its lm_head.
    """

    token_N: Tensor
    states: dict[str, Tensor]
    start: int
    steps: int
    target: Target

    @property
    def rows(self) -> int:
        return len(self.token_N) - self.steps

    def embedding(self, ahead: int = 1) -> Tensor:
        """Of every row's token, and of the drafts that later steps read [T + steps - 1, D]."""
        count = self.rows + self.steps - 1
        read_N = self.token_N[ahead : ahead + count].to(self.target.device)
        return self.target.embed(read_N).float().cpu()

    def position(self) -> Tensor:
        return self.start + torch.arange(self.rows + self.steps - 1)

    def lm_head(self, read_ND: Tensor) -> Tensor:
        """The target's logits [N, V] of what its lm_head reads, a part of its rows at a time."""
        parts = self.target.lm_head.weight.split(8192)
        return torch.cat([read_ND @ part.float().cpu().T for part in parts], dim=-1)


class Layout(ABC):
    """One serving layout.

    Attributes:
        name: its name in `formats.LAYOUTS`.
        family: of the heads that it holds.
        forbidden: words that the folder's path must not contain.
        needs: patterns of tensor names (`|` between alternatives), each of which a folder of the layout has.
        never: patterns of tensor names that it has not.
        windows: whether it says a head's window.
        vocabularies: whether it says which part of the vocabulary a head drafts.
    """

    name: ClassVar[str]
    family: ClassVar[str]
    forbidden: ClassVar[tuple[str, ...]] = ()
    needs: ClassVar[tuple[str, ...]]
    never: ClassVar[tuple[str, ...]] = ()
    windows: ClassVar[bool] = False
    vocabularies: ClassVar[bool] = False

    def not_held(self, config: Any, target: Target | None = None) -> str:
        """Why a head of this configuration, for this target, can't go here; empty if it can."""
        if config.family != self.family:
            return f"head.family={config.family}"
        faults = list(self.head_faults(config))
        window = getattr(config, "window", 0)
        if window and not self.windows:
            faults.append(f"head.window={window} (it has no place for one)")
        drafted = getattr(config, "draft_vocabulary", 0)
        if drafted and not self.vocabularies:
            faults.append(f"head.draft_vocabulary={drafted} (it has no place for one)")
        if not faults and target is not None:
            faults = list(self.target_faults(config, target))
        return ", ".join(faults)

    @abstractmethod
    def head_faults(self, config: Any) -> Iterator[str]:
        """What of a head's options the layout can't hold."""

    @abstractmethod
    def target_faults(self, config: Any, target: Target) -> Iterator[str]:
        """What engines would compute otherwise for this target."""

    @abstractmethod
    def tensors(self, head: DraftHead, target: Target, dtype: torch.dtype) -> dict[str, Tensor]:
        """The layout's tensors, complete: nothing missing, nothing else."""

    @abstractmethod
    def config(self, head: DraftHead, target: Target) -> dict[str, Any]:
        """The folder's config.json, every key that engines read written out."""

    @abstractmethod
    def recognises(self, config: Mapping[str, Any]) -> bool:
        """Whether a config.json names this layout: it decides where several have the folder's tensors."""

    @abstractmethod
    def read(
        self, tensors: dict[str, Tensor], config: Mapping[str, Any], target: Target
    ) -> DraftHead:
        """The head of a folder, in float32; a missing, extra, misshapen or non-finite tensor is an error naming it."""

    @abstractmethod
    def served(
        self, tensors: Mapping[str, Tensor], config: Mapping[str, Any], chain: Chain
    ) -> list[Tensor]:
        """Logits [V] of each step of a chain by the engine's own equation, straight from tensors (float32) and config.

        Writing and reading share one mapping, in which a fault cancels out: this shares nothing with either. -inf
        where a token can't be drafted.
        """

    @abstractmethod
    def serving(self, config: Any, target: str, head: str, drafts: int) -> list[Serving]:
        """How engines serve the folder `head`, of a head of this configuration, with the target's folder."""

    def tidied(self, tensors: dict[str, Tensor], target: Target) -> dict[str, Tensor]:
        """Another trainer's tensors under the layout's names, without copies of the target's own."""
        return tensors

    def write(self, folder: Path, head: DraftHead, target: Target) -> None:
        """The folder's files that engines read."""
        tensors = self.tensors(head, target, target.dtype)
        save_tensors(tensors, folder / TENSORS, metadata={"format": "pt"})
        write_json(folder / CONFIG, self.config(head, target))

    def load(self, folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What `write` or another trainer left: tensors and config."""
        return read_weights(folder), read_json(folder / CONFIG)


def require_tensors(
    found: Mapping[str, Tensor],
    wanted: Mapping[str, Tensor],
    optional: Collection[str] = (),
) -> None:
    """Raise unless the tensors are those wanted, by name, shape and kind of number, and finite.

    Args:
        wanted: tensors of the right shapes; what is in them does not matter.
        optional: names that may be there as well.
    """
    missing, extra = set(wanted) - set(found), set(found) - set(wanted) - set(optional)
    if missing or extra:
        raise UserError(
            "a head folder must hold the layout's tensors and nothing else",
            f"missing {sorted(missing)}, extra {sorted(extra)}",
            "export the head again, or check its layout",
        )
    for name, tensor in found.items():
        expected = wanted.get(name)
        if expected is not None and tensor.shape != expected.shape:
            raise UserError(
                "a tensor must have the target's dimensions",
                f"{name} {tuple(tensor.shape)} for {tuple(expected.shape)}",
                "use the head's own target",
            )
        if expected is not None and tensor.is_floating_point() != expected.is_floating_point():
            raise UserError(
                "a tensor must be of the layout's kind of number",
                f"{name} {tensor.dtype} for {expected.dtype}",
                "export the head again",
            )
        if tensor.is_floating_point() and tensor.element_size() < 2:
            raise UserError(
                "a head's weights must be of 16 bits or more: fp8 means nothing without its scales",
                f"{name} {tensor.dtype}",
                "take the head's plain weights",
            )
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise UserError("a head's weights must be finite", name, "use an earlier export")


def cast(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Tensors as they are written: sorted, floating ones in `dtype`, nothing shared."""
    return {
        name: (value.to(dtype) if value.is_floating_point() else value)
        .detach()
        .cpu()
        .contiguous()
        .clone()
        for name, value in sorted(tensors.items())
    }
