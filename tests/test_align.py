"""Alignment of tokens, states and labels: the only shift of the code base, held against hand-made lists."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from toys import VOCABULARY, index_states

from mtp_train.attention.packed import RolloutContext
from mtp_train.batches.align import (
    Rollout,
    answer_rows,
    draft_rows,
    next_tokens,
    rollout,
    verified_tokens,
)
from mtp_train.batches.pack import Pack
from mtp_train.heads.chain import ChainHead
from mtp_train.heads.mtp import MtpConfig, build
from mtp_train.models.target import Target
from mtp_train.train.step import PackLoss, RolloutModule

WIDTH = 4
OWN = 100  # what the scripted head adds to its input state, once per step


@dataclass
class ScriptedTarget:
    """Embeds a token as a vector of its own number."""

    width: int = WIDTH

    def embed(self, token_T: Tensor) -> Tensor:
        return token_T.float().unsqueeze(1).repeat(1, self.width)


@dataclass
class ScriptedHead:
    """Returns its input state plus OWN, and writes down what it was given."""

    calls: list[tuple[list[int], list[int], list[int]]] = field(default_factory=list)

    def __call__(
        self, embedding: Tensor, state: Tensor, position: Tensor, context: RolloutContext
    ) -> Tensor:
        token, held = (value[:, 0].int().tolist() for value in (embedding, state))
        self.calls.append((token, held, position.tolist()))
        return state + OWN

    def at(self, step: int) -> ScriptedHead:
        return self

    def embed(self, target: Target, token: Tensor) -> Tensor:
        return target.embed(token)

    def fuse(self, states: dict[str, Tensor]) -> Tensor:
        return states["post_norm"]


def trained(
    tokens: list[int], mask: list[int], offsets: list[int], steps: int, ahead: int = 1
) -> list[list[tuple[int, int, int]]]:
    """Per step, the (input token, input state, label) triples that training uses; states are row numbers."""
    aligned = rollout(torch.tensor(tokens), torch.tensor(mask), offsets, steps, ahead)
    head = ScriptedHead()
    target: Target = ScriptedTarget()  # type: ignore[assignment]
    states = index_states(len(tokens), WIDTH)
    outputs: Any = ChainHead.outputs  # of what has its parts
    outputs(head, target, aligned, {"post_norm": states})
    triples = []
    for step, (token, state, _) in enumerate(head.calls):
        rows = aligned.source_SN[step].tolist()
        chosen = zip(rows, aligned.label.tolist(), aligned.valid_SN[step].tolist(), strict=True)
        triples.append([(token[row], state[row], label) for row, label, valid in chosen if valid])
    return triples


def test_three_prompt_and_three_answer_tokens() -> None:
    """DEFECTS 6. Tokens 10 11 12 are the prompt, 13 14 15 the answer.

    Step 0, row p holds token x[p+1] and the target's state H[p]; its label is x[p+2]. At step s the token is
    x[p+1+s], the state the head's own (row number + s * OWN), the label x[p+2+s].
    """
    triples = trained([10, 11, 12, 13, 14, 15], [0, 0, 0, 1, 1, 1], [0, 6], steps=3)
    assert triples == [
        [(12, 1, 13), (13, 2, 14), (14, 3, 15)],
        [(12, 0 + OWN, 13), (13, 1 + OWN, 14), (14, 2 + OWN, 15)],
        [(13, 0 + 2 * OWN, 14), (14, 1 + 2 * OWN, 15)],  # no chain is long enough for 13
    ]


def test_a_model_without_a_state_reads_each_token_at_its_own_position() -> None:
    """Row p holds token x[p]; its label is x[p+1], and x[0] is read though nothing is trained there."""
    tokens, mask, offsets = [20, 21, 10, 11, 12], [0, 1, 0, 1, 1], [0, 2, 5]
    triples = trained(tokens, mask, offsets, steps=2, ahead=0)
    assert triples == [
        [(20, 0, 21), (10, 2, 11), (11, 3, 12)],
        [(11, 2 + OWN, 12)],
    ]
    aligned = rollout(torch.tensor(tokens), torch.tensor(mask), offsets, 2, ahead=0)
    assert aligned.token_ST.tolist() == [[20, 21, 10, 11, 12], [21, 0, 11, 12, 0]]
    assert aligned.position_ST.tolist() == [[0, 1, 0, 1, 2], [1, 2, 1, 2, 3]]
    assert aligned.source_SN[0].tolist() == aligned.goal.tolist() == [0, 2, 3]


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_drafted_token_stands_where_training_has_it(ahead: int) -> None:
    """After the newest token, at position 7, draft s is token 7 + s of the text."""
    text = torch.arange(20)
    aligned = rollout(text, torch.ones_like(text), [0, 20], 4, ahead)
    carried = 7 - ahead  # the row whose output the first draft is chosen from
    rows = [rows[0] for rows in draft_rows([7], 4, ahead)]
    assert rows == aligned.position_ST[1:, carried].tolist()
    assert aligned.token_ST[1:, carried].tolist() == [8, 9, 10]


def test_a_second_document_is_aligned_as_if_it_stood_alone() -> None:
    first = [20, 21, 22, 23]
    second = [10, 11, 12, 13, 14, 15]
    packed = trained(first + second, [0, 0, 1, 1, 0, 0, 0, 1, 1, 1], [0, 4, 10], steps=3)
    alone = trained(second, [0, 0, 0, 1, 1, 1], [0, 6], steps=3)
    of_first = trained(first, [0, 0, 1, 1], [0, 4], steps=3)
    moved = [[(token, state + len(first), label) for token, state, label in step] for step in alone]
    assert packed == [one + two for one, two in zip(of_first, moved, strict=True)]


def test_no_goal_crosses_into_the_next_document() -> None:
    """The first token of a document is nobody's to predict, even when its mask says 1."""
    tokens, mask = [20, 21, 10, 11, 12], [1, 1, 1, 1, 1]
    aligned = rollout(torch.tensor(tokens), torch.tensor(mask), [0, 2, 5], 2)
    assert aligned.label.tolist() == [21, 11, 12]
    assert trained(tokens, mask, [0, 2, 5], 2) == [[(11, 2, 12)], []]
    assert aligned.token_ST[0].tolist() == [21, 0, 11, 12, 0], (
        "rows past a document's end hold token 0"
    )
    assert aligned.token_ST[1].tolist() == [0, 0, 12, 0, 0]
    assert aligned.position_ST.tolist() == [[0, 1, 0, 1, 2], [1, 2, 1, 2, 3]]


def test_only_masked_tokens_are_goals_and_several_replies_count() -> None:
    tokens = list(range(30, 40))
    mask = [0, 0, 1, 1, 0, 0, 0, 1, 0, 1]
    triples = trained(tokens, mask, [0, 10], steps=1)
    assert triples == [[(31, 0, 32), (32, 1, 33), (36, 5, 37), (38, 7, 39)]]


@pytest.mark.parametrize("mask", [[0] * 6, [1] + [0] * 5])
def test_a_document_without_a_goal_gives_none(mask: list[int]) -> None:
    aligned = rollout(torch.arange(6), torch.tensor(mask), [0, 6], 3)
    assert aligned.goal.shape == (0,)
    assert aligned.source_SN.shape == (3, 0)
    assert aligned.valid_SN.shape == (3, 0)


def test_documents_of_one_and_two_tokens() -> None:
    aligned = rollout(torch.tensor([5, 6, 7]), torch.tensor([1, 1, 1]), [0, 1, 3], 3)
    assert aligned.label.tolist() == [7]
    assert not aligned.valid_SN.any(), "two tokens leave no row before the goal's own"


# --- documents in a pack never see each other -----------------------------------------------------------------


def make_pack(seed: int, first_seed: int) -> Pack:
    """Two documents; `first_seed` changes tokens and states of the first alone."""
    second = torch.Generator().manual_seed(seed)
    first = torch.Generator().manual_seed(first_seed)
    tokens = [
        torch.randint(VOCABULARY, (rows,), generator=g) for rows, g in ((7, first), (9, second))
    ]
    states = [torch.randn(rows, 32, generator=g) for rows, g in ((7, first), (9, second))]
    mask = torch.tensor([0, 0, 1, 1, 1, 1, 1, 0, 0, 0, 1, 1, 1, 1, 1, 1])
    return Pack(
        ("one", "two"), (0, 7, 16), torch.cat(tokens), mask, {"post_norm": torch.cat(states)}
    )


def per_document(loss: PackLoss, boundary: int) -> tuple[Tensor, Tensor]:
    """The KL of each document's terms, all steps in a row; goals without a row of their own document have none."""
    first, valid = loss.rollout.goal < boundary, loss.rollout.valid_SN
    kl = loss.values.terms["kl"]
    return kl[valid & first], kl[valid & ~first]


def test_changing_one_document_leaves_the_other_alone(toy_target: Target) -> None:
    """DEFECTS 7, through every rollout step; the control is that the changed document does change."""
    module = RolloutModule(build(toy_target, MtpConfig()), toy_target)
    before = per_document(module(make_pack(1, first_seed=2), 3), 7)
    after = per_document(module(make_pack(1, first_seed=3), 3), 7)
    assert torch.equal(before[1], after[1])
    assert (before[0] != after[0]).all()


def test_a_pack_gives_each_document_what_it_gets_alone(toy_target: Target) -> None:
    module = RolloutModule(build(toy_target, MtpConfig()), toy_target)
    pack = make_pack(1, first_seed=2)
    alone = Pack(
        ("two",),
        (0, 9),
        pack.token_T[7:],
        pack.loss_mask_T[7:],
        {"post_norm": pack.states["post_norm"][7:]},
    )
    together = per_document(module(pack, 3), 7)[1]
    loss = module(alone, 3)
    assert torch.allclose(together, per_document(loss, 0)[1], atol=1e-6)
    assert len(together) == 6 + 6 + 5, "six goals; no chain of three steps reaches the first"


# --- the engine's shifts are the same shift -------------------------------------------------------------------


def random_rollout(
    lengths: list[int], prompts: list[int], seed: int, ahead: int = 1
) -> tuple[Tensor, list[int], Rollout]:
    token_T = torch.randint(
        VOCABULARY, (sum(lengths),), generator=torch.Generator().manual_seed(seed)
    )
    mask = [
        int(row >= prompt)
        for length, prompt in zip(lengths, prompts, strict=True)
        for row in range(length)
    ]
    offsets = [0]
    for length in lengths:
        offsets.append(offsets[-1] + length)
    return token_T, offsets, rollout(token_T, torch.tensor(mask), offsets, 3, ahead)


def test_next_tokens_are_the_rollouts_first_step() -> None:
    token_T, offsets, aligned = random_rollout([5, 1, 8, 2], [2, 1, 3, 1], seed=4)
    last_B = torch.tensor(offsets[1:]) - 1
    following_B = torch.tensor([50, 51, 52, 53])
    following = next_tokens(token_T.clone(), last_B, following_B)
    inner = torch.ones(len(token_T), dtype=torch.bool)
    inner[last_B] = False
    assert torch.equal(following[inner], aligned.token_ST[0][inner])
    assert following[last_B].tolist() == [50, 51, 52, 53]


def test_next_tokens_leave_their_input_alone() -> None:
    token_T = torch.tensor([1, 2, 3])
    next_tokens(token_T, torch.tensor([2]), torch.tensor([9]))
    assert token_T.tolist() == [1, 2, 3]


@pytest.mark.parametrize("accepted", [0, 1, 2, 3])
def test_verified_tokens_are_those_of_the_text_that_was_committed(accepted: int) -> None:
    """Rows n-1 .. n-1+a of the verified text, aligned as training would align the finished text."""
    known, drafts, following = [7, 8, 9], [20, 21, 22], 40
    text = torch.tensor([*known, *drafts[:accepted], following])
    aligned = rollout(text, torch.ones_like(text), [0, len(text)], 1)
    verified = verified_tokens(
        torch.tensor([drafts]), torch.tensor([accepted]), torch.tensor([following])
    )
    first = len(known) - 1
    assert verified.shape == (1, 4)
    assert (
        verified[0, : accepted + 1].tolist()
        == aligned.token_ST[0, first : first + accepted + 1].tolist()
    )


def test_verified_tokens_of_a_ragged_batch_stay_apart() -> None:
    drafts = torch.tensor([[20, 21, 22], [30, 31, 32]])
    verified = verified_tokens(drafts, torch.tensor([3, 1]), torch.tensor([40, 50]))
    assert verified[0].tolist() == [20, 21, 22, 40]
    assert verified[1, :2].tolist() == [30, 50]


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize(("prompt", "length"), [(1, 2), (1, 6), (2, 3), (3, 6), (5, 6), (4, 17)])
def test_answer_rows_are_the_rollouts_goals_and_sources(
    prompt: int, length: int, ahead: int
) -> None:
    _, _, aligned = random_rollout([length], [prompt], prompt, ahead)
    goals, sources = answer_rows(prompt, length, ahead)
    valid = aligned.valid_SN[0]
    rows = torch.arange(length)
    assert rows[goals].tolist() == aligned.goal[valid].tolist()
    assert rows[sources].tolist() == aligned.source_SN[0][valid].tolist()


def test_the_head_zeroes_the_embedding_at_position_0_alone(toy_target: Target) -> None:
    """The row contract's one exception (SERVING.md): position 0 has no embedding, at every step."""
    head = build(toy_target, MtpConfig())
    with torch.no_grad():
        head.eh_proj.weight[:, :32] = torch.eye(32)  # make the embedding count
    seen: list[Tensor] = []
    hook = head.enorm.register_forward_pre_hook(
        lambda _module, inputs: seen.append(inputs[0].detach())
    )
    pack = make_pack(1, first_seed=2)
    RolloutModule(head, toy_target)(pack, 2)
    hook.remove()
    zero = [(step == 0).all(-1).nonzero().flatten().tolist() for step in seen]
    assert zero == [[0, 7], []]
