"""The chunked loss against the slow equations: values, gradients, and errors against float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from toys import VOCABULARY, conversations, make_store

from mtp_train.batches.pack import load_pack
from mtp_train.core.errors import UserError
from mtp_train.heads.mtp import MtpConfig, build
from mtp_train.losses import reference
from mtp_train.losses.chunked import distill
from mtp_train.losses.weights import geometric
from mtp_train.models.target import Target
from mtp_train.train.step import RolloutModule


def case(
    steps: int, goals: int, width: int, vocabulary: int, seed: int = 0, scale: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Student states [S, N, D], teacher states [N, D] and an lm_head [V, D], float64."""
    generator = torch.Generator().manual_seed(seed)
    head = torch.randn(vocabulary, width, generator=generator, dtype=torch.float64) * scale
    teacher = torch.randn(goals, width, generator=generator, dtype=torch.float64)
    student = torch.randn(steps, goals, width, generator=generator, dtype=torch.float64)
    return student.requires_grad_(), teacher, head


def weights_like(steps: int, goals: int) -> Tensor:
    """Upstream weights of both signs, none alike, some zero."""
    weight = torch.linspace(-1.5, 2.0, steps * goals, dtype=torch.float64).reshape(steps, goals)
    weight[0, steps * goals // 3 : steps * goals // 2] = 0.0
    return weight


@pytest.mark.parametrize("chunk", [1, 3, 7, 13, 256])
@pytest.mark.parametrize(
    ("steps", "goals", "width", "vocabulary"), [(1, 1, 3, 2), (3, 13, 8, 61), (2, 7, 5, 130)]
)
def test_chunked_equals_the_equation(
    chunk: int, steps: int, goals: int, width: int, vocabulary: int
) -> None:
    student, teacher, head = case(steps, goals, width, vocabulary)
    weight = weights_like(steps, goals)
    fast = distill(student, teacher, head, measure=True, chunk=chunk)
    slow = reference.kl(student, teacher, head)
    assert fast.kl_SN.dtype == torch.float64
    torch.testing.assert_close(fast.kl_SN, slow, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(
        fast.alpha_SN, reference.alpha(student, teacher, head).detach(), rtol=1e-10, atol=1e-12
    )
    assert torch.equal(fast.agree_SN, reference.agreement(student, teacher, head))
    (gradient,) = torch.autograd.grad((fast.kl_SN * weight).sum(), student)
    (expected,) = torch.autograd.grad((slow * weight).sum(), student)
    torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-12)
    assert expected.abs().max() > 1e-3


def test_the_gradient_is_the_slope_of_the_value() -> None:
    student, teacher, head = case(2, 5, 4, 11)
    assert torch.autograd.gradcheck(
        lambda states: distill(states, teacher, head, chunk=2).kl_SN, student
    )


def test_the_equation_itself_by_hand() -> None:
    """p = (3/4, 1/4) against q = (1/2, 1/2) and against p itself."""
    head = torch.tensor([[1.0], [0.0]], dtype=torch.float64)
    teacher = torch.tensor([[3.0]], dtype=torch.float64).log()
    student = torch.stack([torch.zeros(1, 1, dtype=torch.float64), teacher])
    expected = 0.75 * torch.log(torch.tensor(1.5)) + 0.25 * torch.log(torch.tensor(0.5))
    for kl in (reference.kl(student, teacher, head), distill(student, teacher, head).kl_SN):
        assert kl[:, 0].tolist() == pytest.approx([float(expected), 0.0], abs=1e-7)
    assert reference.alpha(student, teacher, head)[:, 0].tolist() == pytest.approx([0.75, 1.0])
    assert reference.agreement(student, teacher, head).tolist() == [[True], [True]]


def test_upstream_weights_scale_the_gradient_row_by_row() -> None:
    student, teacher, head = case(3, 5, 4, 17)
    (plain,) = torch.autograd.grad(distill(student, teacher, head, chunk=2).kl_SN.sum(), student)
    weight = weights_like(3, 5)
    (weighted,) = torch.autograd.grad(
        (distill(student, teacher, head, chunk=2).kl_SN * weight).sum(), student
    )
    torch.testing.assert_close(weighted, plain * weight.unsqueeze(-1))


def test_no_goals_is_no_loss_and_no_gradient() -> None:
    student, teacher, head = case(3, 0, 4, 17)
    result = distill(student, teacher, head, measure=True)
    assert result.kl_SN.shape == result.alpha_SN.shape == result.agree_SN.shape == (3, 0)
    result.kl_SN.sum().backward()
    assert student.grad is not None
    assert student.grad.shape == (3, 0, 4)


def test_the_target_and_its_lm_head_get_no_gradient() -> None:
    student, teacher, head = case(2, 4, 4, 17)
    teacher.requires_grad_()
    head.requires_grad_()
    distill(student, teacher, head).kl_SN.sum().backward()
    assert teacher.grad is None
    assert head.grad is None
    assert student.grad is not None


def test_alpha_is_left_out_unless_measured_and_changes_nothing_else() -> None:
    student, teacher, head = case(2, 9, 4, 17)
    plain, measured = (
        distill(student, teacher, head, measure=flag, chunk=4) for flag in (False, True)
    )
    assert not plain.alpha_SN.any()
    assert (measured.alpha_SN > 0).all()
    assert torch.equal(plain.kl_SN, measured.kl_SN)
    assert torch.equal(plain.agree_SN, measured.agree_SN)


def test_it_runs_without_gradients() -> None:
    student, teacher, head = case(2, 9, 4, 17)
    with torch.no_grad():
        result = distill(student, teacher, head)
    assert not result.kl_SN.requires_grad
    torch.testing.assert_close(result.kl_SN, reference.kl(student, teacher, head).detach())


# --- rounding -------------------------------------------------------------------------------------------------


def near(alpha_gap: float, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """A student close to its teacher, with logits of the size a real model has, rounded to `dtype`."""
    student, teacher, head = case(2, 37, 24, 301, seed=3, scale=0.6)
    close = teacher + alpha_gap * student.detach()
    return close.to(dtype), teacher.to(dtype), head.to(dtype)


def values_and_gradient(
    kind: str, student: Tensor, teacher: Tensor, head: Tensor
) -> tuple[Tensor, Tensor]:
    student = student.detach().clone().requires_grad_()
    kl = (
        distill(student, teacher, head, chunk=16).kl_SN
        if kind == "chunked"
        else reference.kl(student, teacher, head)
    )
    (gradient,) = torch.autograd.grad(kl.sum(), student)
    return kl.detach().double(), gradient.double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("gap", [0.02, 0.3], ids=["alpha_near_0.98", "far"])
def test_rounding_is_no_worse_than_the_plain_formulas(dtype: torch.dtype, gap: float) -> None:
    """Against float64 on the same rounded inputs.

    Stated tolerance: a tenth of the plain formula's own error, and beyond it one unit of the dtype's precision of the
    largest entry for gradients, four units of the float32 precision of the largest logit for values (a KL is the
    difference of two sums as large as a logit; it is reported, not differentiated).
    """
    states = near(gap, dtype)
    exact = values_and_gradient("plain", *(state.double() for state in states))
    plain = values_and_gradient("plain", *states)
    fast = values_and_gradient("chunked", *states)
    largest = (states[1].double() @ states[2].double().T).abs().max()
    units = (
        4 * torch.finfo(torch.float32).eps * largest,
        torch.finfo(dtype).eps * exact[1].abs().max(),
    )
    for truth, slow, quick, unit in zip(exact, plain, fast, units, strict=True):
        assert (quick - truth).abs().max() <= 1.1 * (slow - truth).abs().max() + unit
        root = truth.numel() ** 0.5
        assert (quick - truth).norm() <= 1.1 * (slow - truth).norm() + unit * root


@pytest.mark.parametrize("gap", [0.02, 0.3], ids=["alpha_near_0.98", "far"])
def test_bfloat16_gradients_are_right_to_a_few_hundredths(gap: float) -> None:
    """DEFECTS 19: near alpha = 0.98 public trainers' bfloat16 gradients were 19-31 % wrong; 5 % is allowed here."""
    states = near(gap, torch.bfloat16)
    exact = values_and_gradient("plain", *(state.double() for state in states))[1]
    fast = values_and_gradient("chunked", *states)[1]
    assert (fast - exact).norm() < 0.05 * exact.norm()


def test_the_near_case_is_near() -> None:
    alpha = reference.alpha(*near(0.02, torch.float64)).mean()
    assert 0.97 < alpha < 0.995


# --- the other pieces -----------------------------------------------------------------------------------------


def test_smooth_l1_by_hand() -> None:
    teacher = torch.zeros(1, 2)
    student = torch.tensor([[[0.5, 3.0]], [[0.0, 0.0]]])
    # 0.5 * 0.5**2 below 1, |x| - 0.5 above
    assert reference.smooth_l1(student, teacher).tolist() == [[(0.125 + 2.5) / 2], [0.0]]


def test_step_weights_fall_by_the_decay_and_sum_to_one() -> None:
    assert geometric(3, 0.5).tolist() == pytest.approx([4 / 7, 2 / 7, 1 / 7])
    assert geometric(1, 0.7).tolist() == [1.0]
    assert geometric(4, 1.0).tolist() == [0.25] * 4


@pytest.mark.parametrize("decay", [0.0, -1.0, 1.5])
def test_a_decay_outside_its_range_is_refused(decay: float) -> None:
    with pytest.raises(UserError, match=f"received {decay}"):
        geometric(3, decay)


@pytest.mark.parametrize("step", [0, 1, 2])
@pytest.mark.parametrize("term", ["kl", "state"])
def test_every_term_of_the_training_loss_has_a_gradient(
    toy_target: Target, tmp_path: Path, term: str, step: int
) -> None:
    """DEFECTS 20: each draft step's KL and state distance, as the training loss counts them, moves the whole head."""
    store = make_store(tmp_path, toy_target, conversations(3))
    head = build(toy_target, MtpConfig())
    result = RolloutModule(head, toy_target)(load_pack(store, [0, 1, 2], torch.device("cpu")), 3)
    alone = torch.eye(3)[step]
    loss = result.weighted(alone, 0.0)
    if term == "state":
        loss = result.weighted(alone, 1.0) - loss
    loss.backward()
    still = [
        name
        for name, weight in head.named_parameters()
        if weight.grad is None or not weight.grad.any()
    ]
    assert still == []
    assert all(parameter.grad is None for parameter in toy_target.model.parameters())


def test_the_training_loss_is_its_terms_weighted(toy_target: Target, tmp_path: Path) -> None:
    store = make_store(tmp_path, toy_target, conversations(3))
    module = RolloutModule(build(toy_target, MtpConfig()), toy_target)
    with torch.no_grad():
        result = module(load_pack(store, [0, 1, 2], torch.device("cpu")), 3)
    weight = torch.tensor([0.5, 0.3, 0.2])
    total = 0.0
    for step in range(3):
        for goal in range(len(result.rollout.goal_N)):
            if result.rollout.valid_SN[step, goal]:
                term = float(result.distill.kl_SN[step, goal]) + 0.1 * float(
                    result.state_SN[step, goal]
                )
                total += float(weight[step]) * term
    assert float(result.weighted(weight, 0.1)) == pytest.approx(total, rel=1e-5)
    assert not result.rollout.valid_SN.all(), "the data has terms that must be left out"


def test_a_part_of_the_vocabulary_is_renormalised_in_training_and_whole_in_validation(
    toy_target: Target, tmp_path: Path
) -> None:
    store = make_store(tmp_path, toy_target, conversations(3))
    head = build(toy_target, MtpConfig())
    part = torch.arange(0, VOCABULARY, 3)
    pack = load_pack(store, [0, 1, 2], torch.device("cpu"))
    whole, some = RolloutModule(head, toy_target), RolloutModule(head, toy_target, part)
    assert torch.equal(
        some(pack, 2, measure=True).distill.kl_SN, whole(pack, 2, measure=True).distill.kl_SN
    )
    trained = some(pack, 2)
    aligned = trained.rollout
    outs = []
    hook = head.final_norm.register_forward_hook(
        lambda _module, _inputs, out: outs.append(out.squeeze(0))
    )
    some(pack, 2)
    hook.remove()
    student = torch.stack([out[rows] for out, rows in zip(outs, aligned.source_SN, strict=True)])
    expected = reference.kl(
        student, pack.hidden_TD[aligned.goal_N], toy_target.lm_head.weight[part]
    )
    valid = aligned.valid_SN
    torch.testing.assert_close(trained.distill.kl_SN[valid], expected[valid], rtol=1e-4, atol=1e-6)
