"""A confidence's temperatures: what they are fitted to, and by how much chances are off."""

from __future__ import annotations

import pytest
import torch

from mtp_train.train.calibrate import calibration_error, chances, fit_temperatures

CHAINS = 20_000


def said_and_done(temperature_S: list[float], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits that are so many times too large, and drafts accepted by the true chances."""
    generator = torch.Generator().manual_seed(seed)
    true_SN = torch.randn(len(temperature_S), CHAINS, generator=generator) + 1
    agree_SN = torch.rand(true_SN.shape, generator=generator) < true_SN.sigmoid()
    return true_SN * torch.tensor(temperature_S).unsqueeze(1), agree_SN


def test_the_temperatures_that_made_a_confidence_are_found() -> None:
    logit_SN, agree_SN = said_and_done([3.0, 0.5, 1.0])
    fitted = fit_temperatures(logit_SN, agree_SN)
    torch.testing.assert_close(fitted, torch.tensor([3.0, 0.5, 1.0]), rtol=0.12, atol=0)


def test_fitted_chances_are_less_far_off_at_every_step() -> None:
    logit_SN, agree_SN = said_and_done([4.0, 4.0, 4.0])
    before = calibration_error(chances(logit_SN, torch.ones(3)), agree_SN)
    after = calibration_error(chances(logit_SN, fit_temperatures(logit_SN, agree_SN)), agree_SN)
    assert all(new < 0.02 < 0.05 < old for new, old in zip(after, before, strict=True))


def test_a_calibration_error_by_hand() -> None:
    """Two bins: .95 said of two chains of which one hits, .15 of two of which none does."""
    chance_SN = torch.tensor([[0.95, 0.95, 0.15, 0.15]])
    agree_SN = torch.tensor([[True, False, False, False]])
    assert calibration_error(chance_SN, agree_SN) == [pytest.approx((0.9 + 0.3) / 4)]


def test_no_chain_leaves_the_temperatures_at_1() -> None:
    none = torch.zeros(2, 0)
    assert fit_temperatures(none, none.bool()).tolist() == [1.0, 1.0]
