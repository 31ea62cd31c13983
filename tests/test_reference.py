"""The gate's fourth rule: our forward is transformers' own, on the same weights, before features are computed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_quantised import quantised_folder
from toy_families import CONFIGS, toy
from toys import conversations, make_store, make_target

from mtp_train.core.errors import UserError
from mtp_train.core.records import Accounting
from mtp_train.models.reference import sharing_model
from mtp_train.models.target import Target
from mtp_train.precompute.gate import check_reference
from mtp_train.precompute.live import prepare_live
from mtp_train.precompute.sources import EngineStates
from mtp_train.precompute.stage import PrecomputeConfig
from mtp_train.store.corpus import write_corpus

TEXT = tuple(range(3, 59))  # longer than the toys' windows
STATES = ("layer_0", "layer_1", "pre_norm", "post_norm")


@pytest.mark.parametrize("name", CONFIGS)
def test_the_forward_of_every_type_is_transformers_own(name: str) -> None:
    target = toy(name)
    states = (*STATES, f"layer_{target.layers}")
    told = check_reference(target, TEXT, states)
    assert told["rows"] == len(TEXT) and set(told["compared"]) == {*states, "logits"}
    for one in told["compared"].values():
        assert one["error"] < 1e-5 and one["tolerance"] == 1e-3


@pytest.mark.parametrize("name", ["int8", "int8_dynamic", "fp8", "mxfp4"])
def test_quantised_targets_are_compared_with_what_they_hold(name: str, tmp_path: Path) -> None:
    folder = quantised_folder(tmp_path, name)
    asked = name if name.startswith("int8") else "none"
    target = Target.load(folder, "float32", quantisation=asked)
    with torch.inference_mode():  # as precompute does
        told = check_reference(target, TEXT, STATES)
    expected = 0.05 if name == "int8_dynamic" else 1e-3
    assert {one["tolerance"] for one in told["compared"].values()} == {expected}


def test_the_other_model_has_no_weights_of_its_own() -> None:
    target = make_target()
    theirs, ours = sharing_model(target).state_dict(), target.model.state_dict()
    assert theirs.keys() == ours.keys()
    assert all(theirs[name].data_ptr() == value.data_ptr() for name, value in ours.items())
    assert not any(parameter.requires_grad for parameter in target.model.parameters())


def turned(target: Target) -> None:
    config = copy.deepcopy(target.config)
    config.rope_parameters = {"rope_type": "default", "rope_theta": 100.0}
    target.base.rotary_emb = type(target.base.rotary_emb)(config)


def one_layer_late(target: Target) -> None:
    capture = target.capture

    def late(tokens: Any, positions: Any, context: Any, states: Any) -> dict[str, torch.Tensor]:
        moved = {name: name.replace("layer_1", "layer_2") for name in states}
        found = capture(tokens, positions, context, tuple(moved.values()))
        return {name: found[other] for name, other in moved.items()}

    target.capture = late  # type: ignore[method-assign]


def uncapped(target: Target) -> None:
    target.config.final_logit_softcapping = None


def unscaled(target: Target) -> None:
    for layer in target.base.layers:
        layer.self_attn.scaling *= 2


def without_windows(target: Target) -> None:
    for layer in target.base.layers:
        layer.self_attn.sliding_window = None


def another_epsilon(target: Target) -> None:
    target.base.norm.variance_epsilon = 0.5


@pytest.mark.parametrize(
    ("name", "damage", "what"),
    [
        ("llama", turned, "layer_1"),
        ("llama", one_layer_late, "layer_1"),
        ("llama", unscaled, "layer_1"),
        ("llama", another_epsilon, "post_norm"),
        ("gemma2", uncapped, "logits"),
        ("gemma2", without_windows, "layer_1"),
    ],
)
def test_a_wrong_forward_is_refused(
    name: str, damage: Callable[[Target], None], what: str, tmp_path: Path
) -> None:
    """What the target computes differs from what its config.json says."""
    toy(name).model.save_pretrained(tmp_path)  # type: ignore[operator]
    target = Target.load(tmp_path, "float32")
    damage(target)
    with pytest.raises(UserError, match=f"target's {what} must be those of transformers' own"):
        check_reference(target, TEXT, ("post_norm",))


def test_bfloat16_rounds_but_another_rope_does_not_pass(tmp_path: Path) -> None:
    toy("llama").model.save_pretrained(tmp_path)  # type: ignore[operator]
    target = Target.load(tmp_path, "bfloat16")
    told = check_reference(target, TEXT, STATES)["compared"]
    assert told["layer_1"]["tolerance"] == pytest.approx(3 / 128)
    assert told["post_norm"]["tolerance"] == pytest.approx(3 / 128 * 2**0.5), "two layers"
    assert told["post_norm"]["error"] > 1e-4
    again = Target.load(tmp_path, "bfloat16")
    turned(again)
    with pytest.raises(UserError, match=r"layer_1 must be those.*own model, to 0\.023"):
        check_reference(again, TEXT, STATES)


def test_a_store_remembers_that_it_was_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    check = EngineStates.check_reference
    monkeypatch.setattr(
        EngineStates,
        "check_reference",
        lambda self, tokens: (asked.append(len(tokens)), check(self, tokens))[1],
    )
    chats, target = conversations(3), make_target()
    told = make_store(tmp_path, target, chats).manifest.gate["reference"]
    assert told["rows"] == len(chats[0].tokens) and told["compared"]["post_norm"]["error"] < 1e-5
    assert make_store(tmp_path, target, chats).manifest.gate["reference"] == told
    assert asked == [len(chats[0].tokens)]
    other = make_store(tmp_path / "other", target, chats, states=("layer_2", "post_norm"))
    assert "layer_2" in other.manifest.gate["reference"]["compared"] and len(asked) == 2


def test_what_is_measured_of_a_set_is_the_same_in_a_process_that_made_another_before() -> None:
    target, other = make_target(), [token + 1 for token in TEXT[:-1]]
    check_reference(target, other, STATES)
    assert check_reference(target, TEXT, STATES) == check_reference(make_target(), TEXT, STATES)


def test_a_wrong_target_leaves_no_features(tmp_path: Path) -> None:
    make_target().model.save_pretrained(tmp_path / "target")  # type: ignore[operator]
    target = Target.load(tmp_path / "target", "float32")
    turned(target)
    with pytest.raises(UserError, match="transformers' own model"):
        make_store(tmp_path / "features", target, conversations(3))
    assert not list((tmp_path / "features").glob("shard-*"))
    corpus = write_corpus(tmp_path / "text", conversations(3), "inputs", Accounting())
    with pytest.raises(UserError, match="transformers' own model"):
        prepare_live(target, corpus, PrecomputeConfig())
