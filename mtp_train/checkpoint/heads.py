"""Write, find and load head checkpoints. A head is refused for another target than its own, before it is used.

A checkpoint is a folder: `head.safetensors` (float32), `head.json` (family, target, sizes, provenance, hash of the
tensors), and what the trainer adds for resuming. Folders appear whole, by rename.
"""

from __future__ import annotations

import shutil
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from mtp_train.core.errors import UserError
from mtp_train.core.owned import Kind, remove_own, replaced_folder, require_own
from mtp_train.core.progress import say
from mtp_train.core.provenance import (
    file_digests,
    read_json,
    require_files,
    sealed,
    unsealed,
    versions,
    write_json,
)
from mtp_train.heads.base import DraftHead
from mtp_train.heads.families import family_of, make_head
from mtp_train.heads.vocabulary import coverage, require_vocabulary
from mtp_train.models.identity import FORWARD, TEXT, Identity, differences, require_same
from mtp_train.models.target import Target
from mtp_train.store.tensor_files import save_tensors

TENSORS = "head.safetensors"
CARD = "head.json"
CHECKPOINT = Kind(
    "head's folder",
    {TENSORS: (), CARD: ("family", "target_hash", "files")},
    ("optimizer.safetensors", "average.safetensors", "progress.json"),
)
OTHER_NAME = "move it away, or name another run folder"
RESTORE = "use another checkpoint, or restore the file from a backup"
BEGINNINGS = (
    "init",
    "embedding_noise",
    "draft_vocabulary",
    "mask_token",
    "anchor_share",
    "most_anchors",
    "depth_share",
    "least_share",
    "path",
    "model",
    "source",
)  # options that a warm start has no use for

OF_WEIGHTS = ("quantisation", "target_hash")  # what a warm start may differ in


@dataclass(frozen=True)
class HeadCard:
    """What a checkpoint says of itself.

    Attributes:
        state: the target state that its lm_head reads.
        files: SHA-256 of what lies beside the tensors, by name.
        quantisation: of the target that it was trained for.
        identity: of that target and its text, by field (models.identity); empty on cards of earlier versions.
        config: how it was trained.
        head: how it is made: the fields of its family's dataclass. `save_checkpoint` fills it in, and the hashes.
        changed: what of `config` changed in the middle of training, each with the step.
        measured: acceptance through the engine at this step, where training measured it: tau and what stands behind it.
        calibration: of a head that says how sure it is: its temperatures, by how much its chances are off (`error`, by
            draft step; `error_before` without them), and over how many chains.
    """

    family: str
    target_hash: str
    state: str
    hidden_size: int
    vocab_size: int
    step: int
    sha256: str = ""  # of the tensor file
    files: dict[str, str] = field(default_factory=dict)
    quantisation: str = "none"
    identity: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=versions)
    head: dict[str, Any] = field(default_factory=dict)  # empty: the family's defaults
    measured: dict[str, Any] = field(default_factory=dict)
    changed: list[dict[str, Any]] = field(default_factory=list)
    calibration: dict[str, Any] = field(default_factory=dict)


def save_checkpoint(
    folder: Path,
    head: DraftHead,
    card: HeadCard,
    extra: dict[str, dict[str, Tensor]] | None = None,
    notes: dict[str, Any] | None = None,
) -> None:
    """Write a checkpoint folder atomically.

    Args:
        extra: file name -> tensors, beside the head's.
        notes: file name -> JSON value.
    """
    tensors = {
        name: (tensor.float() if tensor.is_floating_point() else tensor).detach().cpu().contiguous()
        for name, tensor in head.state_dict().items()
    }
    with replaced_folder(folder, CHECKPOINT, OTHER_NAME) as new:
        save_tensors(tensors, new / TENSORS)
        for name, values in (extra or {}).items():
            save_tensors(
                {key: value.cpu().contiguous() for key, value in values.items()}, new / name
            )
        for name, value in (notes or {}).items():
            write_json(new / name, value)
        files = file_digests(new)
        own = {"sha256": files.pop(TENSORS), "files": files, "head": asdict(head.config)}
        write_json(new / CARD, sealed(asdict(card) | own))


def copy_checkpoint(source: Path, folder: Path) -> None:
    """Put a copy of a whole checkpoint in place of `folder`, atomically."""
    card = read_card(source)
    with replaced_folder(folder, CHECKPOINT, OTHER_NAME) as new:
        for name in (TENSORS, *card.files, CARD):
            shutil.copyfile(source / name, new / name)


def require_own_checkpoint(folder: Path) -> None:
    """Raise if something else than a checkpoint lies where one is to be written."""
    require_own(folder, CHECKPOINT, OTHER_NAME)


def remove_checkpoint(folder: Path) -> None:
    """Remove a checkpoint's files; what else lies in its folder stays."""
    remove_own(folder, CHECKPOINT)


def read_card(folder: Path) -> HeadCard:
    """The checkpoint's card; a folder without one is no checkpoint."""
    if not (folder / CARD).is_file():
        raise UserError(
            f"a head checkpoint must hold {CARD}", folder, "run train, or name the folder it wrote"
        )
    value = unsealed(read_json(folder / CARD), folder / CARD, RESTORE)
    known = {
        item.name: item.default is item.default_factory is MISSING for item in fields(HeadCard)
    }
    needed = {name for name, required in known.items() if required}
    if not isinstance(value, dict) or not needed <= set(value) <= set(known):
        raise UserError(
            "a head's card must hold its fields", folder / CARD, "use another checkpoint"
        )
    return HeadCard(**value)


def warm_start(
    folder: Path, target: Target, config: Any, counts_V: Tensor | None = None
) -> DraftHead:
    """A head to train further, of the configured family and options.

    It may come from another target of the same sizes. A head of one module begins every module of a head of several.
    What its block has for itself it keeps, unless the configuration says otherwise (head.layer).
    The draft vocabulary of an lm_head of its own stays as it is, since the rows mean these tokens; of a head that reads
    the target's, one of another size is chosen anew. How much of the new text it covers is said.

    Args:
        config: the family's dataclass; how a fresh head would begin does not matter.
        counts_V: how often each token is trained.
    """
    head, card = load_head(folder, target, same_weights=False)
    head = head.extended(target, config, counts_V)
    wanted, found = asdict(config), asdict(head.config)
    differ = [
        name
        for name in wanted.keys() | found.keys()
        if name not in BEGINNINGS and wanted.get(name) not in (found.get(name), [], {})
    ]
    if differ:
        raise UserError(
            "a warm start needs a head of the configured family and options",
            ", ".join(
                f"{name} {found.get(name)} for {wanted.get(name)}" for name in sorted(differ)
            ),
            "change the section head, or train.warm_start",
        )
    if head.vocabulary is not None and counts_V is not None:
        share = coverage(head.vocabulary.cpu(), counts_V)
        say(f"head: its {len(head.vocabulary)} draft tokens cover {share:.2%} of the trained text")
    say(f"head: begins as {folder} after step {card.step}")
    return head


def load_head(
    folder: Path, target: Target, *, same_weights: bool = True
) -> tuple[DraftHead, HeadCard]:
    """Load a head for `target`, in float32; every mismatch is an error that names it.

    same_weights: the target must be the very one that the head was trained for.
    """
    card = read_card(folder)
    family_of(card.family)
    require_match(card, target, same_weights=same_weights)
    require_files(folder, {TENSORS: card.sha256}, RESTORE)
    head = make_head(target, {"family": card.family} | card.head)
    head.load_state_dict(load_tensors(folder / TENSORS, head.state_dict()))
    if head.vocabulary is not None:
        require_vocabulary(head.vocabulary, target.vocab_size)
    return head.to(target.device), card


def require_match(card: HeadCard, target: Target, *, same_weights: bool = True) -> None:
    """Raise unless the head was trained for this target and this state."""
    for name, found, expected in (
        ("hidden_size", card.hidden_size, target.hidden_size),
        ("vocab_size", card.vocab_size, target.vocab_size),
        ("state", card.state, target.state),
        ("quantisation", card.quantisation, target.quantisation),
        ("target_hash", card.target_hash, target.hash),
    ):
        if found != expected and (same_weights or name not in OF_WEIGHTS):
            raise UserError(
                f"a head must be used with its own target ({name} {expected})",
                found,
                "name the target it was trained for",
            )
    if same_weights:
        require_own_config(card, target.identity)
        told = differences(card.identity, target.identity, TEXT)
    else:
        told = differences(card.identity, target.identity)
    if told:
        say(f"head: its target or text was another: {'; '.join(told)}")


def require_own_config(card: HeadCard, identity: Identity) -> None:
    """Raise unless the head was trained under this config and tokenizer. Loads no target."""
    remedy = "restore the target's files, or warm start from this head for the changed target"
    require_same(card.identity, identity, "a head", remedy, FORWARD)


def load_tensors(path: Path, expected: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a file, held against names, shapes and finiteness."""
    try:
        tensors = load_file(path)
    except (SafetensorError, FileNotFoundError) as error:
        raise UserError(
            "a checkpoint must hold a whole safetensors file",
            f"{path}: {error}",
            "use another checkpoint",
        ) from error
    if set(tensors) != set(expected):
        raise UserError(
            "a checkpoint must hold the head's tensors",
            f"difference {sorted(set(tensors) ^ set(expected))}",
            "use another checkpoint",
        )
    for name, tensor in tensors.items():
        if tensor.shape != expected[name].shape:
            raise UserError(
                "a tensor must have the head's shape",
                f"{name} {tuple(tensor.shape)} for {tuple(expected[name].shape)}",
                "use another checkpoint",
            )
        if not bool(tensor.isfinite().all()):
            raise UserError(
                "a head's weights must be finite", f"{name} in {path}", "use an earlier checkpoint"
            )
    return tensors


def find_checkpoints(folder: Path) -> list[Path]:
    """Whole checkpoints below `folder`, oldest step first."""
    return sorted(path.parent for path in folder.glob(f"step-*/{CARD}"))
