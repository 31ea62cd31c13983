"""Fit a fresh head's projections to the features before the first step. Knows no family.

A head's projection maps the next token's embedding and the target's state to what the target's last layer would work
on at the next position. That map has a closed form: least squares over some thousand rows, in seconds, where gradient
descent takes hundreds of steps.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from mtp_train.batches.align import rollout
from mtp_train.batches.pack import Features, load_pack, ordered_packs
from mtp_train.core.errors import UserError
from mtp_train.core.progress import progress, say
from mtp_train.heads.base import DraftHead
from mtp_train.heads.start import begin_fitted
from mtp_train.models.target import Target

FIT_ROWS = 65536
PER_WEIGHT = 4  # rows for each input of the projection, below which a warning is given


def fit_projections(head: DraftHead, target: Target, features: Features) -> None:
    """Fit every projection of `head`, in place, to the first `FIT_ROWS` rows of the features.

    Raises:
        UserError: the family has no projection that could be fitted.
    """
    projections = head.projections()
    if not projections:
        raise UserError(
            "head.init=fitted needs a head that projects [embedding | state]",
            head.family,
            "use mtp or eagle, or another head.init",
        )
    for projection in projections:
        count = begin_fitted(target, projection, _rows(head, target, features))
    say(f"head: projection fitted to {count} rows by least squares")
    width = projections[0].linear.in_features
    if count < PER_WEIGHT * width:
        say(f"head: {count} rows are few for {width} inputs; head.init=last_layer may begin better")


def _rows(
    head: DraftHead, target: Target, features: Features
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Embeddings, states and next states of every row but a document's first and last, pack by pack."""
    left = min(FIT_ROWS, int(features.lengths().sum()))
    with progress(left, "fit the projection", "row") as bar:
        for indices in ordered_packs(features.lengths(), 2048):
            pack = load_pack(features, indices, target.device)
            every = pack.loss_mask_T.new_ones(len(pack.token_T))
            aligned = rollout(pack.token_T, every, pack.offsets, 1, head.ahead)
            inner = aligned.valid_SN[0] & (aligned.position_ST[0][aligned.source_SN[0]] > 0)
            source_N, goal_N = aligned.source_SN[0][inner], aligned.goal[inner]
            state_TD = pack.states[target.state]
            embedding_ND = head.embed(target, aligned.token_ST[0][source_N])
            yield embedding_ND, head.fuse(pack.states)[source_N], state_TD[goal_N]
            bar.update(len(pack.token_T))
            left -= len(pack.token_T)
            if left <= 0:
                return
