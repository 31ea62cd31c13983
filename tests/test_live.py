"""Features computed as training asks for them: the batches of a store, its states, its curve, and nothing on disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from test_cli import dispatch, mistake, overrides, save_target, write_prompts
from test_train import BARE, close, curve, fit
from toys import TwoRanks, conversation, conversations, make_store, make_target

from mtp_train.batches.pack import epoch_packs, load_pack
from mtp_train.checkpoint.heads import find_checkpoints
from mtp_train.core.errors import UserError
from mtp_train.core.provenance import read_json
from mtp_train.core.records import Accounting, TokenizedConversation
from mtp_train.models.target import Target
from mtp_train.precompute.live import LiveFeatures, LiveManifest, prepare_live
from mtp_train.precompute.stage import PrecomputeConfig
from mtp_train.store.corpus import Corpus, write_corpus

CPU = torch.device("cpu")
CONFIG = PrecomputeConfig(rows_per_shard=64, rows_per_forward=32, live=True)
CHATS = [
    *conversations(23),
    conversation("long", range(40), range(60)),
]  # longer than any pack here
TRAINING = replace(BARE, epochs=2, rows=48, beta1=0.9, clip=0.5, validations=2, learning_rate=1e-3)


def make_live(
    folder: Path,
    target: Target,
    chats: Sequence[TokenizedConversation] = CHATS,
    states: Sequence[str] = ("post_norm",),
) -> LiveFeatures:
    """The chats' live features, by the precompute stage's own functions."""
    corpus = write_corpus(folder, chats, "inputs", Accounting(used=len(chats)))
    prepare_live(target, corpus, replace(CONFIG, states=list(states)))
    return LiveFeatures(target, Corpus(folder), LiveManifest.load(folder))


# --- the same batches -----------------------------------------------------------------------------------------


def test_packs_are_those_of_a_store(toy_target: Target, tmp_path: Path) -> None:
    """Order, keys, tokens, masks and counts exactly; states up to what another packing rounds; auxiliary ones too."""
    states = ("post_norm", "layer_1", "pre_norm")
    live = make_live(tmp_path / "text", toy_target, states=states)
    store = make_store(tmp_path / "store", toy_target, CHATS, states=states)
    assert np.array_equal(live.lengths(), store.lengths())
    assert np.array_equal(live.loss_tokens(), store.loss_tokens())
    for trained in (False, True):
        assert torch.equal(live.token_counts(trained=trained), store.token_counts(trained=trained))
    assert live.manifest.loss_tokens == store.manifest.loss_tokens
    same = ("target_hash", "states", "hidden_size", "vocab_size", "dtype", "data_digest")
    for name in same:
        assert getattr(live.manifest.contract, name) == getattr(store.manifest.contract, name)
    packs = epoch_packs(live.lengths(), 48, 0, 0)
    assert packs == epoch_packs(store.lengths(), 48, 0, 0)
    assert max(map(len, packs)) > 1
    for indices in packs:
        ours, stored = (load_pack(features, indices, CPU) for features in (live, store))
        assert (ours.keys, ours.offsets) == (stored.keys, stored.offsets)
        for name in ("token_T", "loss_mask_T"):
            assert torch.equal(getattr(ours, name), getattr(stored, name))
            assert getattr(ours, name).dtype == getattr(stored, name).dtype
        assert list(ours.states) == list(stored.states) == list(states)
        for name in states:
            torch.testing.assert_close(ours.states[name], stored.states[name])


def test_only_the_states_asked_for_are_computed(toy_target: Target, tmp_path: Path) -> None:
    make_live(tmp_path, toy_target, states=("post_norm", "layer_1"))
    features = LiveFeatures(toy_target, Corpus(tmp_path), LiveManifest.load(tmp_path), ["layer_1"])
    assert list(features.read([0])[0].states) == ["layer_1"]
    with pytest.raises(UserError, match="features must hold the states layer_2"):
        LiveFeatures(toy_target, Corpus(tmp_path), LiveManifest.load(tmp_path), ["layer_2"])


def test_states_are_the_targets_own_under_any_autocast(toy_target: Target, tmp_path: Path) -> None:
    features = make_live(tmp_path, toy_target)
    plain = load_pack(features, [0, 1], CPU).states["post_norm"]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        within = load_pack(features, [0, 1], CPU).states["post_norm"]
    assert plain.dtype == within.dtype == toy_target.dtype
    assert torch.equal(plain, within)
    weight = torch.ones(plain.shape[1], requires_grad=True)
    (within * weight).sum().backward()  # states made in inference mode could not be kept for this
    assert weight.grad is not None


def test_a_sequence_without_tokens_counts_nothing(tmp_path: Path) -> None:
    chats = [conversation(str(index), [1] * index, [2] * (index % 2)) for index in (0, 3, 0, 0, 2)]
    corpus = write_corpus(tmp_path, chats, "inputs", Accounting())
    assert corpus.loss_tokens.tolist() == [0, 1, 0, 0, 0]
    assert corpus.token_counts(4).tolist() == [0, 5, 1, 0]


# --- the same training ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_training_is_that_from_a_store(toy_target: Target, tmp_path: Path, precision: str) -> None:
    live = make_live(tmp_path / "text", toy_target)
    store = make_store(tmp_path / "store", toy_target, CHATS)
    heads = {
        name: fit(toy_target, features, TRAINING, tmp_path / name, precision=precision)  # type: ignore[arg-type]
        for name, features in (("live", live), ("stored", store))
    }
    ours, stored = (curve(tmp_path / name) for name in heads)
    assert len(ours) == len(stored) > 6
    loose = 1e-4 if precision == "no" else 2e-2
    assert [row["loss"] for row in ours] == pytest.approx(
        [row["loss"] for row in stored], rel=loose
    )
    for one, other in zip(*(curve(tmp_path / name, "validation") for name in heads), strict=True):
        assert one["validation"] == pytest.approx(other["validation"], rel=loose, abs=loose)
    if precision == "no":
        close(heads["live"].state_dict(), heads["stored"].state_dict(), scale=1e-3)


def test_a_broken_run_goes_on_to_the_same_bytes(
    toy_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    features = make_live(tmp_path / "text", toy_target)
    whole = fit(toy_target, features, TRAINING, tmp_path / "whole")  # type: ignore[arg-type]
    reads, read = 0, LiveFeatures.read

    def interrupted(self: LiveFeatures, indices: Sequence[int]) -> object:
        nonlocal reads
        reads += 1
        if reads > 12:
            raise KeyboardInterrupt
        return read(self, indices)

    out = tmp_path / "broken"
    with monkeypatch.context() as patch:
        patch.setattr(LiveFeatures, "read", interrupted)
        with pytest.raises(KeyboardInterrupt):
            fit(toy_target, features, TRAINING, out)  # type: ignore[arg-type]
    assert find_checkpoints(out / "checkpoints")
    again = LiveFeatures(toy_target, Corpus(tmp_path / "text"), features.manifest)
    mended = fit(toy_target, again, TRAINING, out)  # type: ignore[arg-type]
    for name, value in whole.state_dict().items():
        assert torch.equal(value, mended.state_dict()[name]), name


def test_two_ranks_compute_what_two_ranks_read(two_ranks: TwoRanks) -> None:
    """Each rank its own packs' states, from a corpus of its own: the curve is that of the shared store."""
    assert [row["processes"] for row in two_ranks.records("live")] == [2, 2]
    ours, stored = (curve(two_ranks.folder / name) for name in ("live", "even"))
    assert len(ours) == len(stored) > 1
    assert [row["loss"] for row in ours] == pytest.approx([row["loss"] for row in stored], rel=1e-4)


# --- the gate -------------------------------------------------------------------------------------------------


def test_the_gate_looks_at_a_sample_and_says_so(toy_target: Target, tmp_path: Path) -> None:
    gate = make_live(tmp_path, toy_target).manifest.gate
    assert 2 <= gate["sequences"] < len(CHATS)
    assert gate["rows"] > 0
    assert read_json(tmp_path / "live.json")["gate"] == gate
    assert read_json(tmp_path / "live.json")["accounting"]["used"] == len(CHATS)


@pytest.mark.parametrize(("state", "message"), [("post_norm", "argmax"), ("layer_1", "captured")])
def test_states_that_are_not_the_engines_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, message: str
) -> None:
    """The packed forward of a target gives rows of a neighbour; nothing is noted."""
    from mtp_train.precompute import live

    def shifted(*args: object) -> dict[str, torch.Tensor]:
        found = packed(*args)  # type: ignore[arg-type]
        return {**found, state: found[state].roll(1, 0)}

    packed = live.packed_states
    monkeypatch.setattr(live, "packed_states", shifted)
    with pytest.raises(UserError, match=message):
        make_live(tmp_path, make_target(initializer_range=0.3), states=("post_norm", "layer_1"))
    assert not (tmp_path / "live.json").exists()


def test_a_row_that_is_not_finite_stops_the_run_at_any_pack(tmp_path: Path) -> None:
    target = make_target()
    features = make_live(tmp_path, target)
    target.base.norm.weight[:] = float("nan")
    with pytest.raises(UserError, match=r"finite and not zero.*chat-3"):
        features.read([3])


def test_features_of_another_target_dtype_or_text_are_refused(tmp_path: Path) -> None:
    target = make_target()
    live = make_live(tmp_path / "text", target)
    other = write_corpus(tmp_path / "other", CHATS[:3], "inputs", Accounting())
    with pytest.raises(UserError, match="features must have data_digest"):
        LiveFeatures(target, other, live.manifest)
    target.hash = "another"
    with pytest.raises(UserError, match="features must have target_hash"):
        LiveFeatures(target, live.corpus, live.manifest)
    del target.hash
    target.model.bfloat16()
    with pytest.raises(UserError, match="features must have dtype bfloat16"):
        LiveFeatures(target, live.corpus, live.manifest)


# --- a whole run ----------------------------------------------------------------------------------------------


def test_a_run_keeps_no_features(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a disk that is full, as far as plans go. A store made afterwards is not taken for the live features."""
    monkeypatch.setattr(torch, "set_num_threads", lambda _count: None)
    save_target(tmp_path / "target")
    write_prompts(tmp_path / "prompts")
    live = overrides(tmp_path, "precompute.live=true")
    monkeypatch.setattr("mtp_train.precompute.estimate.free_bytes", lambda _path: 0)
    for stage in ("regenerate", "precompute", "train", "evaluate", "report"):
        dispatch(stage, live)
    run = tmp_path / "run"
    assert not list(run.glob("precompute/**/*.safetensors"))
    assert sorted(path.name for path in (run / "precompute").iterdir() if path.is_dir()) == [
        "heldout.text",
        "train.text",
    ]
    for name in ("train", "heldout"):
        note = read_json(run / "precompute" / f"{name}.text" / "live.json")
        assert note["live"] is True
        assert note["gate"]["rows"] > 0
    assert read_json(run / "evaluate" / "evaluation.json")["validation"]
    capsys.readouterr()
    dispatch("precompute", live)
    dispatch("train", live)
    said = capsys.readouterr()
    assert (said.out + said.err).count("done before") == 2
    line = mistake(capsys, "train", *overrides(tmp_path))
    assert "features of this run's last precompute" in line
    with pytest.raises(UserError, match="the features must fit on the disk"):
        dispatch("precompute", overrides(tmp_path))
    dispatch("precompute", overrides(tmp_path, "plan.allow_shortfall=true"))
    line = mistake(capsys, "train", *live)
    assert "features of this run's last precompute" in line


def test_live_features_need_our_engine_on_every_rank() -> None:
    for other in ({"tensor_parallel": 2}, {"vllm": replace(CONFIG.vllm, python="python")}):
        with pytest.raises(UserError, match="live features are computed by our engine"):
            replace(CONFIG, **other)  # type: ignore[arg-type]
