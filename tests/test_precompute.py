"""Text to features: the target's own states behind the gate, the same bytes however often the work is broken off."""

from __future__ import annotations

import random
import shutil
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import children
import pytest
import torch
from children import CHATS, FEATURES
from toys import VOCABULARY, TwoRanks, conversation, conversations, make_target, toy_config
from transformers import AutoModelForCausalLM

from mtp_train.core.dist import Ranks
from mtp_train.core.errors import UserError
from mtp_train.core.records import Accounting, TokenizedConversation
from mtp_train.models.target import Target
from mtp_train.precompute.gate import GateResult, check_rows
from mtp_train.precompute.sources import EngineStates
from mtp_train.precompute.stage import (
    PrecomputeConfig,
    contract_for,
    fill,
    plan_shards,
    precompute,
)
from mtp_train.store.checks import verify_files
from mtp_train.store.corpus import lengths_of
from mtp_train.store.index import shard_name
from mtp_train.store.manifest import NAME, Contract, load_manifest
from mtp_train.store.shards import FeatureStore


def make(
    target: Target,
    out: Path,
    chats: Sequence[TokenizedConversation] = CHATS,
    config: PrecomputeConfig = FEATURES,
    ranks: Ranks | None = None,
) -> None:
    accounting = Accounting(used=len(chats)).as_dict()
    source = EngineStates(target, config.states)
    precompute(source, chats, config, out, accounting, ranks or Ranks())


def contract(
    target: Target, chats: Sequence[TokenizedConversation], config: PrecomputeConfig
) -> Contract:
    return contract_for(EngineStates(target, config.states), chats, config)


def shard_files(folder: Path) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes()
        for path in sorted(folder.glob("shard-*.safetensors")) + sorted(folder.glob(NAME))
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of an unbroken run."""
    folder = tmp_path_factory.mktemp("whole") / "features"
    make(make_target(), folder)
    return folder


# --- what is stored -------------------------------------------------------------------------------------------


def test_states_are_those_of_transformers_own_forward(toy_target: Target, whole: Path) -> None:
    """Sequence by sequence, with transformers' attention and mask, unpacked."""
    plain = AutoModelForCausalLM.from_config(toy_config(), attn_implementation="eager")
    plain.load_state_dict(toy_target.model.state_dict())
    store = FeatureStore(whole)
    assert len(store) == len(CHATS)
    for index, chat in enumerate(CHATS):
        tokens = torch.tensor([chat.tokens])
        with torch.no_grad():
            expected = plain.eval().model(input_ids=tokens).last_hidden_state[0]
        assert store[index].key == chat.key
        assert tuple(store[index].tokens.tolist()) == chat.tokens
        assert tuple(store[index].loss_mask.tolist()) == chat.loss_mask
        torch.testing.assert_close(store[index].hidden, expected, rtol=1e-4, atol=1e-5)


def test_the_manifest_says_what_the_features_are(toy_target: Target, whole: Path) -> None:
    manifest = load_manifest(whole)
    verify_files(FeatureStore(whole))
    assert manifest.contract.states == ("post_norm",)
    assert manifest.contract.dtype == "float32"
    assert (manifest.contract.hidden_size, manifest.contract.vocab_size) == (32, VOCABULARY)
    assert manifest.contract.target_hash == toy_target.hash
    assert manifest.sequences == len(CHATS)
    assert manifest.tokens == sum(len(chat.tokens) for chat in CHATS)
    assert manifest.accounting["used"] == len(CHATS)
    assert manifest.gate["rows"] > 0
    assert manifest.gate["sequences"] >= manifest.shards
    assert {"torch", "transformers", "mtp_train"} <= set(manifest.versions)


def test_shards_are_fixed_by_order_and_row_budget() -> None:
    chats = [
        conversation(str(index), [1], [2] * (length - 1))
        for index, length in enumerate([10, 20, 5, 40, 3, 3])
    ]
    assert [list(shard) for shard in plan_shards(lengths_of(chats), 30)] == [
        [0, 1],
        [2],
        [3],
        [4, 5],
    ]
    assert list(fill([("a", 5), ("b", 5), ("c", 1)], 10)) == [["a", "b"], ["c"]]
    assert list(fill([], 10)) == []


# --- the gate -------------------------------------------------------------------------------------------------


def test_the_gate_refuses_states_without_the_final_norm(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """DEFECTS 1. The pre-norm state is finite and plausible; only the engine's choice gives it away."""
    target = make_target(seed=3)
    with torch.no_grad():
        target.base.norm.weight.copy_(torch.randn(32, generator=torch.Generator().manual_seed(0)))
    make(target, tmp_path / "right")
    before_norm: list[torch.Tensor] = []
    target.base.norm.register_forward_pre_hook(
        lambda _module, inputs: before_norm.append(inputs[0])
    )
    forward = target.forward

    def packed_without_norm(
        tokens: torch.Tensor, positions: torch.Tensor, context: object
    ) -> torch.Tensor:
        out = forward(tokens, positions, context)  # type: ignore[arg-type]
        paged = hasattr(context, "plan")  # the gate's own forward stays right
        return out if paged else before_norm[-1].squeeze(0)

    monkeypatch.setattr(target, "forward", packed_without_norm)
    # transformers' own model would give it away before the first shard
    monkeypatch.setattr(EngineStates, "check_reference", lambda _self, _tokens: {})
    with pytest.raises(
        UserError, match=r"engine's own token; received row \d+ of sequence 'chat-\d+'"
    ):
        make(target, tmp_path / "wrong")
    assert not (tmp_path / "wrong" / NAME).exists(), "a refused store stays unfinished"


def test_the_gate_refuses_the_states_of_another_sequence(
    monkeypatch: pytest.MonkeyPatch, toy_target: Target, tmp_path: Path
) -> None:
    """DEFECTS 3: rows of a pack rolled by one. The comparison with transformers' own model would see it first."""
    monkeypatch.setattr(EngineStates, "check_reference", lambda *_: {})
    forward = toy_target.forward
    monkeypatch.setattr(
        toy_target,
        "forward",
        lambda tokens, positions, context: (
            forward(tokens, positions, context)
            if hasattr(context, "plan")
            else forward(tokens, positions, context).roll(1, 0)
        ),
    )
    with pytest.raises(UserError, match="engine's own token"):
        make(toy_target, tmp_path)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 0.0], ids=["nan", "inf", "zero"])
def test_a_bad_row_stops_the_run_and_names_its_sequence(
    monkeypatch: pytest.MonkeyPatch, toy_target: Target, tmp_path: Path, poison: float
) -> None:
    """DEFECTS 4: one row, in the middle of the data."""
    victim = CHATS[13]
    forward = toy_target.forward

    def poisoned(tokens: torch.Tensor, positions: torch.Tensor, context: object) -> torch.Tensor:
        out = forward(tokens, positions, context)  # type: ignore[arg-type]
        for at in range(len(tokens) - len(victim.tokens) + 1):
            if tuple(tokens[at : at + len(victim.tokens)].tolist()) == victim.tokens:
                out[at + 2] = poison
        return out

    monkeypatch.setattr(toy_target, "forward", poisoned)
    with pytest.raises(UserError, match=f"row 2 of sequence '{victim.key}'"):
        make(toy_target, tmp_path)
    assert not (tmp_path / NAME).exists()


def test_a_single_zero_is_no_zero_row() -> None:
    hidden = torch.ones(3, 4)
    hidden[1, 1:] = 0
    check_rows({"post_norm": hidden}, ["a", "b"], [0, 1, 3])
    hidden[1] = 0
    with pytest.raises(UserError, match="layer_2 of row 0 of sequence 'b'"):
        check_rows({"post_norm": hidden + 1, "layer_2": hidden}, ["a", "b"], [0, 1, 3])
    assert GateResult() == GateResult(0, 0, 0)


# --- stale and unwritable -------------------------------------------------------------------------------------


def test_one_changed_row_of_data_changes_the_contract_and_old_shards_are_neither_used_nor_removed(
    toy_target: Target, tmp_path: Path
) -> None:
    """DEFECTS 23. The changed chat is as long as before: names and sizes of the files would not tell."""
    make(toy_target, tmp_path)
    old = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    last = CHATS[-1]
    changed = [
        *CHATS[:-1],
        replace(last, tokens=((last.tokens[0] + 1) % VOCABULARY, *last.tokens[1:])),
    ]
    assert contract(toy_target, changed, FEATURES) != contract(toy_target, CHATS, FEATURES)
    with pytest.raises(UserError, match=r"data_digest [0-9a-f]+, not [0-9a-f]+; name another"):
        make(toy_target, tmp_path, changed)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == old


@pytest.mark.parametrize(
    "change",
    [
        lambda chats: [replace(chats[0], loss_mask=(1,) * len(chats[0].tokens)), *chats[1:]],
        lambda chats: [replace(chats[0], key="renamed"), *chats[1:]],
        lambda chats: [chats[1], chats[0], *chats[2:]],
        lambda chats: chats[:-1],
    ],
    ids=["mask", "key", "order", "one less"],
)
def test_every_kind_of_change_to_the_data_changes_the_contract(
    toy_target: Target, change: object
) -> None:
    changed = change(CHATS)  # type: ignore[operator]
    assert (
        contract(toy_target, changed, FEATURES).data_digest
        != contract(toy_target, CHATS, FEATURES).data_digest
    )


def test_another_target_or_shard_size_changes_the_contract(
    toy_target: Target, tmp_path: Path
) -> None:
    def saved(seed: int) -> Target:
        folder = tmp_path / str(seed)
        make_target(seed=seed).model.save_pretrained(folder)
        return Target.load(folder, "float32")

    one, other = saved(1), saved(2)
    assert contract(one, CHATS, FEATURES) == contract(saved(1), CHATS, FEATURES)
    assert (
        contract(one, CHATS, FEATURES).target_hash != contract(other, CHATS, FEATURES).target_hash
    )
    wider = replace(FEATURES, rows_per_shard=64)
    assert contract(toy_target, CHATS, wider) != contract(toy_target, CHATS, FEATURES)


def test_the_same_data_again_makes_no_shard_again(
    toy_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(toy_target, tmp_path)
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("shard-*.safetensors")}
    make(toy_target, tmp_path)
    assert {
        path.name: path.stat().st_mtime_ns for path in tmp_path.glob("shard-*.safetensors")
    } == before


def test_an_unwritable_path_is_an_error_before_the_target_works(
    toy_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file stands where the folder should be made: that stops root too."""
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setattr(toy_target, "forward", lambda *_args: pytest.fail("the target ran"))
    with pytest.raises(UserError, match=r"must be writable.*file/features"):
        make(toy_target, tmp_path / "file" / "features")


# --- broken off and gone on -----------------------------------------------------------------------------------


def test_a_killed_run_goes_on_and_ends_with_the_same_bytes(tmp_path: Path) -> None:
    """DEFECTS 22: kill -9 in the middle of a shard, before its note, before the contract and before the manifest."""
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    assert children.run(children.precompute_slowly, unbroken) == 0
    expected = shard_files(unbroken)
    assert len(expected) > 9

    def done() -> dict[str, int]:
        """A shard is done by its note."""
        return {path.name: path.stat().st_mtime_ns for path in broken.glob("shard-*.json")}

    fates = {"before the contract": 0, "half a shard": 2, "before a note": 4}
    fates["before the manifest"] = len(expected) - 2
    for fate, shards in fates.items():
        before = done()
        assert children.run(children.precompute_slowly, broken, fate) == -signal.SIGKILL
        assert shards - 1 <= len(done()) <= shards + 1
        assert before.items() <= done().items(), "work that was done is not done again"
        assert not (broken / NAME).exists()
        with pytest.raises(UserError, match="must be complete"):
            FeatureStore(broken)
    before = done()
    assert children.run(children.precompute_slowly, broken) == 0
    assert shard_files(broken) == expected
    assert before == done()


def test_twenty_kills_at_random_moments_with_one_two_and_three_ranks(tmp_path: Path) -> None:
    """Every sequence once, and the unbroken run's bytes, whatever the number of ranks that goes on."""
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    assert children.run(children.precompute_slowly, unbroken) == 0
    expected = shard_files(unbroken)
    rng = random.Random(1)
    killed = 0
    while killed < 20:
        world = 1 + killed % 3
        ranks = children.launch(children.precompute_on_ranks, world, broken)
        children.kill_after(ranks, rng.uniform(0.05, 0.4), first=rng.randrange(world))
        if all(
            rank.exitcode == 0 for rank in ranks
        ):  # came through before the kill: from the start
            shutil.rmtree(broken)
            continue
        killed += 1
    for rank in (ranks := children.launch(children.precompute_on_ranks, 2, broken)):
        rank.join()
    assert [rank.exitcode for rank in ranks] == [0, 0]
    assert shard_files(broken) == expected
    store = FeatureStore(broken)
    assert [store[index].key for index in range(len(store))] == [chat.key for chat in CHATS]


def test_half_written_files_of_a_killed_run_are_cleared_away(tmp_path: Path) -> None:
    assert children.run(children.precompute_slowly, tmp_path, "half a shard") == -signal.SIGKILL
    assert children.run(children.precompute_slowly, tmp_path) == 0
    left = [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]
    assert left == []


@dataclass
class Meeting(Ranks):
    """A rank that is a thread: all of them meet at a barrier."""

    barrier: threading.Barrier = field(default_factory=lambda: threading.Barrier(1))
    late_for: Path | None = None  # past the second barrier, sleep until this file is there

    def wait(self) -> None:
        self.barrier.wait(timeout=30)
        self._meetings += 1
        if self.late_for is not None and self._meetings == 2:
            end = time.monotonic() + 10
            while not self.late_for.is_file() and time.monotonic() < end:
                time.sleep(0.001)


def on_ranks(target: Target, out: Path, world: int, late_for: Path | None = None) -> None:
    barrier = threading.Barrier(world)
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        try:
            make(
                target,
                out,
                ranks=Meeting(rank, world, barrier=barrier, late_for=late_for if rank else None),
            )
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    broken = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
    if errors:
        raise (broken or errors)[0]


@pytest.mark.parametrize("world", [2, 3])
def test_any_number_of_ranks_ends_with_the_same_bytes(
    toy_target: Target, whole: Path, tmp_path: Path, world: int
) -> None:
    """From nothing, and going on from what another number of ranks left."""
    on_ranks(toy_target, tmp_path, world)
    assert shard_files(tmp_path) == shard_files(whole)
    for number in (0, 3, 4, 7):
        (tmp_path / shard_name(number)).unlink()
    (tmp_path / NAME).unlink()
    on_ranks(toy_target, tmp_path, 5 - world)
    assert shard_files(tmp_path) == shard_files(whole)


def test_each_rank_makes_its_share(
    toy_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[str, str]] = []
    write = children.precomputing.write_shard
    monkeypatch.setattr(
        children.precomputing,
        "write_shard",
        lambda path, *rest: (
            made.append((threading.current_thread().name, Path(path).name)),
            write(path, *rest),
        )[1],
    )
    on_ranks(toy_target, tmp_path, 2)
    shards = [name for _, name in made]
    assert (
        sorted(shards)
        == sorted(set(shards))
        == [path.name for path in sorted(tmp_path.glob("shard-*.safetensors"))]
    )
    counts = [
        len([1 for thread, _ in made if thread == name]) for name in {thread for thread, _ in made}
    ]
    assert len(counts) == 2
    assert max(counts) - min(counts) <= 1


def test_a_rank_that_wakes_late_still_makes_its_share(
    toy_target: Target, whole: Path, tmp_path: Path
) -> None:
    """Rank 1 looks at the folder only when rank 0 has finished a shard already."""
    on_ranks(toy_target, tmp_path, 2, late_for=tmp_path / shard_name(0))
    assert shard_files(tmp_path) == shard_files(whole)


def test_two_real_processes_end_with_the_same_bytes(two_ranks: TwoRanks, tmp_path: Path) -> None:
    """Under torchrun, over gloo: the group's own word that there were two, and each made shards."""
    ranks = two_ranks.records("precompute")
    assert [(row["rank"], row["world"], row["backend"]) for row in ranks] == [
        (0, 2, "gloo"),
        (1, 2, "gloo"),
    ]
    made = [row["shards"] for row in ranks]
    assert all(made)
    assert children.run(children.precompute_slowly, tmp_path) == 0
    assert sorted(made[0] + made[1]) == [
        path.name for path in sorted(tmp_path.glob("shard-*.safetensors"))
    ]
    assert shard_files(two_ranks.folder / "features") == shard_files(tmp_path)


def test_random_chats_have_prompt_and_answer() -> None:
    """The data of these tests: every chat has tokens with and without loss."""
    assert all(0 < sum(chat.loss_mask) < len(chat.tokens) for chat in conversations(50, seed=9))
