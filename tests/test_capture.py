"""Which state is captured, and what the gate says of a wrong one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from children import CHATS, FEATURES
from torch import nn
from toys import conversation, make_target, toy_config
from transformers import AutoModelForCausalLM

from mtp_train.attention.packed import PackedContext
from mtp_train.core.dist import Ranks
from mtp_train.core.errors import UserError
from mtp_train.core.records import Accounting
from mtp_train.models.readout import Readout
from mtp_train.models.target import Target, eagle3_states, layer_of
from mtp_train.precompute import gate
from mtp_train.precompute.gate import GateResult, Sample, check_choices, check_stored
from mtp_train.precompute.sources import EngineStates, expand_states
from mtp_train.precompute.stage import SPEED, PrecomputeConfig, precompute
from mtp_train.store.shards import FeatureStore

ALL = ["post_norm", "pre_norm", "layer_0", "layer_1", "layer_2", "layer_3"]


@pytest.fixture(scope="module")
def deep() -> Target:
    return make_target(seed=2, num_hidden_layers=3)


def capture(target: Target, tokens: list[int], states: list[str]) -> dict[str, torch.Tensor]:
    rows = len(tokens)
    context = PackedContext([0, rows])
    with torch.no_grad():
        return target.capture(torch.tensor(tokens), torch.arange(rows), context, states)


def test_states_are_transformers_own_hidden_states(deep: Target) -> None:
    plain = AutoModelForCausalLM.from_config(
        toy_config(num_hidden_layers=3), attn_implementation="eager"
    ).eval()
    plain.load_state_dict(deep.model.state_dict())
    tokens = list(range(12))
    seen: list[torch.Tensor] = []
    plain.model.norm.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0][0]))
    with torch.no_grad():
        out = plain.model(input_ids=torch.tensor([tokens]), output_hidden_states=True)
    found = capture(deep, tokens, ALL)
    for number in range(3):
        torch.testing.assert_close(found[f"layer_{number}"], out.hidden_states[number][0])
    torch.testing.assert_close(found["post_norm"], out.last_hidden_state[0])
    torch.testing.assert_close(found["pre_norm"], seen[0])
    assert torch.equal(found["layer_3"], found["pre_norm"])


def test_layer_k_is_what_k_layers_have_made() -> None:
    """DEFECTS 2: layer number k adds the constant 1, so the state after k layers is the embedding plus k."""
    target = make_target(seed=1, num_hidden_layers=4)

    class Adds(nn.Module):
        def forward(self, hidden_states: torch.Tensor, **_: object) -> torch.Tensor:
            return hidden_states + 1

    target.base.layers = nn.ModuleList([Adds() for _ in range(4)])
    tokens = [3, 5, 7]
    found = capture(target, tokens, [f"layer_{number}" for number in range(5)])
    for number in range(5):
        expected = target.embed(torch.tensor(tokens)) + number
        torch.testing.assert_close(found[f"layer_{number}"], expected)


def test_capture_leaves_no_hook_behind(deep: Target) -> None:
    capture(deep, [1, 2], ALL)
    assert not any(module._forward_pre_hooks for module in deep.model.modules())


def test_a_batch_captures_what_each_sequence_alone_does(deep: Target) -> None:
    """DEFECTS 3: states of different sequences, some with a prefix in common, again and in another order."""
    prefix = [7] * 64
    chats = [
        conversation("a", [*prefix, 1], [2, 3]),
        conversation("b", [*prefix, 4], [5]),
        conversation("c", [9], [8]),
    ]
    source = EngineStates(deep, ["post_norm", "layer_1"])
    with torch.no_grad():
        alone = {chat.key: source.capture([chat]) for chat in chats}
        for order in (chats, chats[::-1], chats):
            together = source.capture(order)
            start = 0
            for chat in order:
                end = start + len(chat.tokens)
                for name, state in together.items():
                    torch.testing.assert_close(
                        state[start:end], alone[chat.key][name], rtol=1e-4, atol=1e-5
                    )
                start = end


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (2, (0, 1, 2)),
        (3, (0, 1, 3)),
        (5, (1, 2, 4)),
        (7, (2, 3, 4)),
        (30, (2, 15, 27)),
        (80, (2, 40, 77)),
    ],
)
def test_auxiliary_layers_are_three_of_rising_order(layers: int, expected: tuple[int, ...]) -> None:
    """DEFECTS 5: shallow targets too."""
    assert eagle3_states(layers) == tuple(f"layer_{number}" for number in expected)
    assert expand_states(["post_norm", "eagle3"], layers) == ("post_norm", *eagle3_states(layers))


def test_a_target_of_one_layer_has_no_three_states() -> None:
    with pytest.raises(UserError, match="2 layers or more"):
        eagle3_states(1)


@pytest.mark.parametrize("name", ["layer_4", "layer_-1", "layer_x", "last", "layer_1.5", ""])
def test_an_unknown_state_is_refused_with_the_names(name: str) -> None:
    with pytest.raises(UserError, match="layer_0 to layer_3"):
        layer_of(name, 3)


# --- the gate on other states, and on what comes back from disk -------------------------------------------------


def test_the_gate_finds_a_neighbouring_layer(deep: Target) -> None:
    found = capture(deep, list(range(40)), ["layer_1", "layer_2"])
    tokens = torch.arange(40)
    with torch.no_grad():
        check_choices(
            deep, [Sample("right", tokens.tolist(), {"layer_2": found["layer_2"]})], GateResult()
        )
        with pytest.raises(UserError, match=r"layer_2 states must be the engine's own.*'wrong'"):
            check_choices(
                deep,
                [Sample("wrong", tokens.tolist(), {"layer_2": found["layer_1"]})],
                GateResult(),
            )


@pytest.mark.parametrize("rows", [1, 2, 3, 9, 17])
def test_the_gate_reads_long_sequences_piece_by_piece(
    deep: Target, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "PIECE", 4)
    tokens = torch.arange(rows)
    found = capture(deep, tokens.tolist(), ["post_norm", "layer_1"])
    with torch.no_grad():
        again = gate.paged_states(deep, [tokens], ["post_norm", "layer_1"])[0]
    kept = rows - min(max(rows // 2, 1), 4) or rows
    for name, state in again.items():
        assert len(state) == kept
        torch.testing.assert_close(state, found[name][-kept:], rtol=1e-4, atol=1e-5)
    result = GateResult()
    check_choices(deep, [Sample("key", tokens.tolist(), found)], result)
    assert (result.sequences, result.rows) == (1, kept)


@pytest.mark.parametrize("codec", ["raw", "lossless", "fp8"])
def test_every_codec_gives_back_what_it_says(deep: Target, tmp_path: Path, codec: str) -> None:
    config = PrecomputeConfig(["post_norm", "layer_1"], codec, 32, 20)
    deep.model.to(torch.bfloat16)
    try:
        source = EngineStates(deep, config.states)
        precompute(source, CHATS, config, tmp_path, Accounting(used=24).as_dict(), Ranks())
        store = FeatureStore(tmp_path)
        with torch.no_grad():
            alone = source.capture([CHATS[5]])
    finally:
        deep.model.float()
    assert store.manifest.contract.codec == codec
    assert store.manifest.contract.states == ("post_norm", "layer_1")
    for name, state in store[5].states.items():
        assert state.dtype == torch.bfloat16
        error = (state.float() - alone[name].float()).norm() / alone[name].float().norm()
        assert error < 0.05
    if codec == "fp8":
        assert error > 0.001, "eight bits are not sixteen"


def test_a_store_that_gives_back_other_rows_is_found() -> None:
    rows = torch.randn(5, 8, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    check_stored("key", {"post_norm": rows}, {"post_norm": rows}, "raw")
    with pytest.raises(UserError, match=r"give back the post_norm states.*'key'"):
        check_stored("key", {"post_norm": rows}, {"post_norm": rows.roll(1, 0)}, "fp8")
    with pytest.raises(UserError, match="inf"):
        check_stored("key", {"post_norm": rows}, {"post_norm": rows[1:]}, "raw")
    nearly = rows.clone()
    nearly[2, 3] += 2**-6 * nearly[2, 3]
    with pytest.raises(UserError, match=r"written into it, to 0\.0"):
        check_stored("key", {"post_norm": rows}, {"post_norm": nearly}, "lossless")


def test_a_state_that_is_not_finite_stops_the_run_and_names_the_sequence(tmp_path: Path) -> None:
    """DEFECTS 4."""
    target = make_target(seed=4)
    forward = target.forward

    def overflowing(tokens: torch.Tensor, *rest: object) -> torch.Tensor:
        states = forward(tokens, *rest)  # type: ignore[arg-type]
        states[tokens == CHATS[7].tokens[3]] = float("inf")
        return states

    target.forward = overflowing  # type: ignore[assignment, method-assign]
    with pytest.raises(UserError, match=r"finite and not zero.*of sequence 'chat-\d+'"):
        accounting = Accounting(used=24).as_dict()
        precompute(EngineStates(target), CHATS, FEATURES, tmp_path, accounting, Ranks())


def test_the_gate_reads_several_sequences_in_one_batch(
    deep: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "PIECE", 5)
    texts = [torch.arange(rows) for rows in (1, 23, 2, 9)]
    with torch.no_grad():
        together = gate.paged_states(deep, texts, ["post_norm", "layer_2"])
        for text, found in zip(texts, together, strict=True):
            (alone,) = gate.paged_states(deep, [text], ["post_norm", "layer_2"])
            for name, state in alone.items():
                torch.testing.assert_close(found[name], state, rtol=1e-4, atol=1e-5)


# --- a target over several ranks ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    make_target().model.save_pretrained(folder)
    return folder


def spread(world: int, target: Path, folder: Path) -> Iterator[dict[str, object]]:
    folder.mkdir()
    script = Path(__file__).with_name("tensor_ranks.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(world), str(script), str(target), str(folder)]
    environment = {key: value for key, value in os.environ.items() if "PYTEST" not in key}
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    for path in sorted(folder.glob("rank-*.json")):
        yield json.loads(path.read_text())


def test_two_ranks_hold_a_target_together_and_give_its_states(saved: Path, tmp_path: Path) -> None:
    """Two ranks are one unit; four are two units that make the same bytes."""
    records = list(spread(2, saved, tmp_path / "two"))
    assert [record["rank"] for record in records] == [0, 1]
    for record in records:
        assert (record["world"], record["group"], record["units"]) == (2, 2, 1)
        assert record["backend"] == "gloo"
        assert record["query_rows"] == record["of"] // 2, "each rank holds half of the heads"
    whole = Target.load(saved, "float32")
    source = EngineStates(whole, ["post_norm", "layer_1"])
    store = FeatureStore(tmp_path / "two" / "features")
    assert len(store) == len(CHATS)
    with torch.no_grad():
        for index in (0, 11, 23):
            alone = source.capture([CHATS[index]])
            for name, state in store[index].states.items():
                torch.testing.assert_close(state, alone[name], rtol=1e-4, atol=1e-5)

    records = list(spread(4, saved, tmp_path / "four"))
    assert [(record["unit"], record["units"], record["group"]) for record in records] == [
        (0, 2, 2),
        (0, 2, 2),
        (1, 2, 2),
        (1, 2, 2),
    ]
    files = [
        {
            path.name: path.read_bytes()
            for path in (tmp_path / name / "features").iterdir()
            if path.name != SPEED
        }
        for name in ("two", "four")
    ]
    assert files[0] == files[1]


def test_heads_that_do_not_divide_are_refused(saved: Path) -> None:
    with pytest.raises(UserError, match=r"must divide by tensor_parallel 3; received 4 att"):
        Target.load(saved, "float32", tensor_parallel=3)


def test_ranks_that_do_not_divide_are_refused() -> None:
    with pytest.raises(UserError, match="1 ranks, tensor_parallel 2"):
        Ranks().grouped(2)


# --- norm and lm_head alone: all ways in which a checkpoint holds them ------------------------------------------


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("size", ["10GB", "10KB"], ids=["one file", "sharded"])
def test_every_layout_of_a_checkpoint_loads(tmp_path: Path, tied: bool, size: str) -> None:
    """DEFECTS 15, for the whole target and for its norm and lm_head alone."""
    target = make_target(seed=5, tie_word_embeddings=tied)
    with torch.no_grad():
        target.base.norm.weight.copy_(torch.linspace(0.5, 1.5, 32))
    target.model.save_pretrained(tmp_path, max_shard_size=size)
    assert len(list(tmp_path.glob("*.safetensors"))) == 1 or size == "10KB"
    loaded = Target.load(tmp_path, "float32")
    readout = Readout.load(tmp_path, "float32")
    assert readout.layers == 2
    assert readout.hash == loaded.hash
    tokens = list(range(9))
    found = capture(target, tokens, ["post_norm", "pre_norm"])
    again = capture(loaded, tokens, ["post_norm"])
    with torch.no_grad():
        logits = target.logits(found["post_norm"])
        torch.testing.assert_close(loaded.logits(again["post_norm"]), logits)
        normed = readout.normed(found["pre_norm"])
        torch.testing.assert_close(normed, found["post_norm"])
        torch.testing.assert_close(readout.logits(normed), logits)
    assert torch.equal(loaded.lm_head.weight, target.lm_head.weight)
    embeddings = loaded.base.get_input_embeddings().weight
    assert torch.equal(embeddings, target.base.get_input_embeddings().weight)
    assert torch.equal(embeddings, loaded.lm_head.weight) == tied
