"""The training loss of a pack: weights of steps and goals, and that every term moves the head."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from toys import VOCABULARY, conversations, make_store

from mtp_train.batches.pack import Pack, load_pack
from mtp_train.core.errors import UserError
from mtp_train.heads.mtp import MtpConfig, build
from mtp_train.losses import reference
from mtp_train.losses.terms import TERMS, LossConfig
from mtp_train.losses.weights import denominator, geometric, goal_weights, step_weights
from mtp_train.models.target import Target
from mtp_train.store.shards import FeatureStore
from mtp_train.train.step import RolloutModule

CPU = torch.device("cpu")


@pytest.fixture
def store(toy_target: Target, tmp_path: Path) -> FeatureStore:
    return make_store(tmp_path, toy_target, conversations(5))


@pytest.fixture
def pack(store: FeatureStore) -> Pack:
    return load_pack(store, [0, 1, 2], CPU)


# --- steps ----------------------------------------------------------------------------------------------------


def test_step_weights_fall_by_the_decay_and_sum_to_one() -> None:
    assert geometric(3, 0.5).tolist() == pytest.approx([4 / 7, 2 / 7, 1 / 7])
    assert geometric(1, 0.7).tolist() == [1.0]
    assert step_weights("uniform", 4, 0.5).tolist() == [0.25] * 4
    assert step_weights("geometric", 3, 0.5).tolist() == geometric(3, 0.5).tolist()


def test_fastmtps_step_weights_are_the_published_ones() -> None:
    """arXiv 2509.18362: .51, .31, .18 for three steps."""
    assert step_weights("fastmtp", 3, 0.9).tolist() == pytest.approx([0.51, 0.31, 0.18], abs=5e-3)


@pytest.mark.parametrize("decay", [0.0, -1.0, 1.5])
def test_a_decay_outside_its_range_is_refused(decay: float) -> None:
    with pytest.raises(UserError, match=f"received {decay}"):
        geometric(3, decay)


# --- goals ----------------------------------------------------------------------------------------------------


def test_goal_weights_by_hand() -> None:
    """Documents of 4, 3 and 5 rows with three, no and one goals."""
    goal, offsets = torch.tensor([0, 1, 2, 9]), (0, 4, 7, 12)
    assert goal_weights(goal, offsets, "tokens").tolist() == [1.0] * 4
    third = 1 / 3
    by_sequence = goal_weights(goal, offsets, "sequences")
    assert by_sequence.tolist() == pytest.approx([third, third, third, 1.0])
    assert denominator([3, 0, 1], "tokens") == 4
    assert denominator([3, 0, 1], "sequences") == 2
    assert goal_weights(goal[:0], offsets, "sequences").tolist() == []


@pytest.mark.parametrize("mean_over", ["tokens", "sequences"])
def test_neither_packing_nor_padding_nor_ranks_change_the_mean(
    toy_target: Target, store: FeatureStore, mean_over: str
) -> None:
    """DEFECTS 12: one pack, a pack each (as ranks deal them out), or with a document without goals added."""
    module = RolloutModule(
        build(toy_target, MtpConfig()), toy_target, loss=LossConfig(mean_over=mean_over)
    )

    def mean(*packs: Pack) -> tuple[float, torch.Tensor]:
        goals = [int(mask.sum()) for pack in packs for mask in documents(pack)]
        loss = sum(module(pack, 2).values.loss for pack in packs) / denominator(goals, mean_over)
        weight = next(module.parameters())
        return float(loss.detach()), torch.autograd.grad(loss, weight)[0]

    def documents(pack: Pack) -> tuple[torch.Tensor, ...]:
        return pack.loss_mask_T.split(torch.tensor(pack.offsets).diff().tolist())

    one = load_pack(store, [0, 1, 2, 3, 4], CPU)
    padding = load_pack(store, [4], CPU)
    padding.loss_mask_T.zero_()
    padded = Pack(
        (*one.keys, "padding"),
        (*one.offsets, one.offsets[-1] + padding.offsets[-1]),
        torch.cat([one.token_T, padding.token_T]),
        torch.cat([one.loss_mask_T, padding.loss_mask_T]),
        {"post_norm": torch.cat([one.states["post_norm"], padding.states["post_norm"]])},
    )
    loss, gradient = mean(one)
    for packs in (
        (load_pack(store, [index], CPU) for index in range(5)),
        (padded,),
        (one, padding),
    ):
        other, slope = mean(*packs)
        assert other == pytest.approx(loss, rel=1e-5)
        torch.testing.assert_close(slope, gradient, rtol=1e-3, atol=1e-6)


def test_a_mean_over_sequences_is_the_mean_of_the_sequences_means(
    toy_target: Target, store: FeatureStore
) -> None:
    head = build(toy_target, MtpConfig())
    by_token, by_sequence = (
        RolloutModule(head, toy_target, loss=LossConfig(mean_over=name))
        for name in ("tokens", "sequences")
    )
    counts = store.loss_tokens().tolist()
    with torch.no_grad():
        means = [
            float(by_token(load_pack(store, [index], CPU), 1).values.loss) / counts[index]
            for index in range(5)
        ]
        whole = load_pack(store, list(range(5)), CPU)
        found, by_goal = (float(module(whole, 1).values.loss) for module in (by_sequence, by_token))
    assert found / 5 == pytest.approx(sum(means) / 5, rel=1e-5)
    assert found / 5 != pytest.approx(by_goal / sum(counts), rel=1e-3), "lengths differ"


# --- the sum --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [0, 1, 2])
@pytest.mark.parametrize("term", [name for name in TERMS if name != "confidence"])
def test_every_term_of_the_training_loss_has_a_gradient(
    toy_target: Target, pack: Pack, term: str, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DEFECTS 20: each term at each draft step, as the training loss counts it, moves the whole head."""
    head = build(toy_target, MtpConfig())
    module = RolloutModule(head, toy_target, loss=LossConfig({term: 1.0}))
    monkeypatch.setattr(LossConfig, "step_weight", lambda _config, _steps: torch.eye(3)[step])
    module(pack, 3).values.loss.backward()
    still = [
        name
        for name, weight in head.named_parameters()
        if weight.grad is None or not weight.grad.any()
    ]
    assert still == []
    assert all(parameter.grad is None for parameter in toy_target.model.parameters())


def test_the_training_loss_is_its_terms_weighted(toy_target: Target, pack: Pack) -> None:
    config = LossConfig({"kl": 1.0, "smooth_l1": 0.1}, decay=0.6)
    module = RolloutModule(build(toy_target, MtpConfig()), toy_target, loss=config)
    with torch.no_grad():
        result = module(pack, 3)
    weight = config.step_weight(3)
    total = 0.0
    for step in range(3):
        for goal in range(len(result.rollout.goal)):
            if result.rollout.valid_SN[step, goal]:
                kl, state = (
                    float(result.values.terms[name][step, goal]) for name in ("kl", "smooth_l1")
                )
                total += float(weight[step]) * (kl + 0.1 * state)
    assert float(result.values.loss) == pytest.approx(total, rel=1e-5)
    assert not result.rollout.valid_SN.all(), "the data has terms that must be left out"


def test_hard_labels_are_the_goals_own_tokens(toy_target: Target, pack: Pack) -> None:
    """The target's own greedy token would be q's best; the label is the text's next token."""
    module = RolloutModule(
        build(toy_target, MtpConfig()), toy_target, loss=LossConfig({"hard_ce": 1.0})
    )
    with torch.no_grad():
        result = module(pack, 2)
    label = pack.token_T[result.rollout.goal + 1]
    assert torch.equal(result.rollout.label, label)
    part = torch.cat([label.unique()[1:], torch.tensor([VOCABULARY - 1])]).unique()
    some = RolloutModule(module.head, toy_target, part, LossConfig({"hard_ce": 1.0}))
    with torch.no_grad():
        partly, measured = some(pack, 2), some(pack, 2, measure=True)
    missing = ~torch.isin(label, part)
    assert int(partly.values.outside) == int(missing.sum()) > 0
    assert not partly.values.terms["hard_ce"][:, missing].any()
    assert int(measured.values.outside) == 0
    torch.testing.assert_close(measured.values.terms["hard_ce"], result.values.terms["hard_ce"])


def test_a_part_of_the_vocabulary_is_renormalised_in_training_and_whole_in_validation(
    toy_target: Target, pack: Pack
) -> None:
    head = build(toy_target, MtpConfig())
    part = torch.arange(0, VOCABULARY, 3)
    whole, some = RolloutModule(head, toy_target), RolloutModule(head, toy_target, part)
    assert torch.equal(
        some(pack, 2, measure=True).values.terms["kl"],
        whole(pack, 2, measure=True).values.terms["kl"],
    )
    outs = []
    hook = head.final_norm.register_forward_hook(
        lambda _module, _inputs, out: outs.append(out.squeeze(0))
    )
    trained = some(pack, 2)
    hook.remove()
    aligned = trained.rollout
    student = torch.stack([out[rows] for out, rows in zip(outs, aligned.source_SN, strict=True)])
    expected = reference.kl(
        student, pack.states["post_norm"][aligned.goal], toy_target.lm_head.weight[part]
    )
    valid = aligned.valid_SN
    torch.testing.assert_close(
        trained.values.terms["kl"][valid], expected[valid], rtol=1e-4, atol=1e-6
    )
