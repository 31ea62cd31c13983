"""Text to features: the target's own states behind the gate, the same bytes however often the work is broken off."""

from __future__ import annotations

import random
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
from mtp_train.precompute.stage import (
    PrecomputeConfig,
    contract_for,
    fill,
    from_answers,
    plan_shards,
    precompute,
)
from mtp_train.store.manifest import NAME, load_manifest, verify_files
from mtp_train.store.shards import FeatureStore, shard_name
from mtp_train.text.sources import Answer


def make(
    target: Target,
    out: Path,
    chats: Sequence[TokenizedConversation] = CHATS,
    config: PrecomputeConfig = FEATURES,
    ranks: Ranks | None = None,
) -> None:
    precompute(target, chats, config, out, Accounting(used=len(chats)), ranks or Ranks())


def shard_files(folder: Path) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes()
        for path in sorted(folder.glob("shard-*")) + sorted(folder.glob(NAME))
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
    verify_files(whole, manifest)
    assert manifest.contract.state == "post_norm"
    assert manifest.contract.dtype == "float32"
    assert (manifest.contract.hidden_size, manifest.contract.vocab_size) == (32, VOCABULARY)
    assert manifest.contract.target_hash == toy_target.hash
    assert manifest.sequences == len(CHATS)
    assert manifest.tokens == sum(len(chat.tokens) for chat in CHATS)
    assert manifest.accounting["used"] == len(CHATS)
    assert manifest.gate["rows"] > 0
    assert manifest.gate["sequences"] >= len(manifest.shards)
    assert {"torch", "transformers", "mtp_train"} <= set(manifest.versions)


def test_shards_are_fixed_by_order_and_row_budget() -> None:
    chats = [
        conversation(str(index), [1], [2] * (length - 1))
        for index, length in enumerate([10, 20, 5, 40, 3, 3])
    ]
    assert [[chat.key for chat in shard] for shard in plan_shards(chats, 30)] == [
        ["0", "1"],
        ["2"],
        ["3"],
        ["4", "5"],
    ]
    assert list(fill([("a", 5), ("b", 5), ("c", 1)], 10)) == [["a", "b"], ["c"]]
    assert list(fill([], 10)) == []


def answer(key: str, prompt: int, output: int) -> Answer:
    return Answer(key, "c", (), tuple(range(prompt)), tuple(range(10, 10 + output)), "stop")


def test_turns_share_a_sequence_and_one_too_long_leaves_those_before() -> None:
    first = Answer("a", "c", (), (1, 2), (3, 4), "stop")
    second = Answer("a#1", "c", (), (1, 2, 3, 4, 5, 6), (7,), "stop")
    third = Answer("a#2", "c", (), (1, 2, 3, 4, 5, 6, 7, 8), (9, 10), "length")
    accounting = Accounting(used=4)
    rows = [first, second, third, answer("b", 2, 2)]
    joined, other = from_answers(rows, PrecomputeConfig(max_tokens=9), accounting)
    assert joined == TokenizedConversation("a", (1, 2, 3, 4, 5, 6, 7), (0, 0, 1, 1, 0, 0, 1), "c")
    assert other.key == "b"
    assert accounting.used == 3 and accounting.refused == {"longer than 9 tokens": 1}


def test_turns_are_apart_where_ids_or_conversations_differ() -> None:
    first = Answer("a", "c", (), (1, 2), (3, 4), "stop")
    drifted = Answer("a#1", "c", (), (1, 2, 3, 40, 5), (6,), "stop")
    after = Answer("a#2", "c", (), (1, 2, 3, 40, 5, 6, 7), (8,), "stop")
    stranger = Answer("b", "c", (), (1, 2, 3, 40, 5, 6, 7, 8, 9), (1,), "stop")
    gap = Answer("b#2", "c", (), (1, 2, 3, 40, 5, 6, 7, 8, 9, 1, 2), (1,), "stop")
    rows = [first, drifted, after, stranger, gap]
    sequences = from_answers(rows, PrecomputeConfig(), Accounting(used=5))
    assert [item.key for item in sequences] == ["a", "a#1", "b", "b#2"]
    assert sequences[1].tokens == (1, 2, 3, 40, 5, 6, 7, 8)
    assert sequences[1].loss_mask == (0, 0, 0, 0, 0, 1, 0, 1)


def test_answers_are_trained_and_prompts_are_not() -> None:
    accounting = Accounting(used=3)
    answers = [answer("a", 3, 2), answer("too long", 6, 5), answer("b", 1, 4)]
    kept = from_answers(answers, PrecomputeConfig(max_tokens=10), accounting)
    assert [(chat.key, chat.tokens, chat.loss_mask) for chat in kept] == [
        ("a", (0, 1, 2, 10, 11), (0, 0, 0, 1, 1)),
        ("b", (0, 10, 11, 12, 13), (0, 1, 1, 1, 1)),
    ]
    assert accounting.refused == {"longer than 10 tokens": 1}
    assert accounting.examples == {"longer than 10 tokens": "too long"}
    assert accounting.total == 3


def test_no_sequence_at_all_is_an_error_that_says_why() -> None:
    with pytest.raises(UserError, match="longer than 4 tokens"):
        from_answers([answer("a", 3, 2)], PrecomputeConfig(max_tokens=4), Accounting(used=1))


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
    with pytest.raises(
        UserError, match=r"engine's own token; received row \d+ of sequence 'chat-\d+'"
    ):
        make(target, tmp_path / "wrong")
    assert not (tmp_path / "wrong" / NAME).exists(), "a refused store stays unfinished"


def test_the_gate_refuses_the_states_of_another_sequence(
    monkeypatch: pytest.MonkeyPatch, toy_target: Target, tmp_path: Path
) -> None:
    """DEFECTS 3: rows of a pack rolled by one."""
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
    check_rows(hidden, ["a", "b"], [0, 1, 3])
    hidden[1] = 0
    with pytest.raises(UserError, match="row 0 of sequence 'b'"):
        check_rows(hidden, ["a", "b"], [0, 1, 3])
    assert GateResult() == GateResult(0, 0, 0)


# --- stale and unwritable -------------------------------------------------------------------------------------


def test_one_changed_row_of_data_changes_the_contract_and_no_old_shard_is_used(
    toy_target: Target, whole: Path, tmp_path: Path
) -> None:
    """DEFECTS 23. The changed chat is as long as before: names and sizes of the files would not tell."""
    make(toy_target, tmp_path)
    old = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("shard-*")}
    last = CHATS[-1]
    changed = [
        *CHATS[:-1],
        replace(last, tokens=((last.tokens[0] + 1) % VOCABULARY, *last.tokens[1:])),
    ]
    assert contract_for(toy_target, changed, FEATURES) != contract_for(toy_target, CHATS, FEATURES)
    make(toy_target, tmp_path, changed)
    new = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("shard-*")}
    assert new.keys() == old.keys()
    assert all(new[name] > old[name] for name in new), "every shard was made again"
    store = FeatureStore(tmp_path)
    assert tuple(store[len(store) - 1].tokens.tolist()) == changed[-1].tokens
    before, after = (load_manifest(folder).contract.data_digest for folder in (whole, tmp_path))
    assert before != after


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
        contract_for(toy_target, changed, FEATURES).data_digest
        != contract_for(toy_target, CHATS, FEATURES).data_digest
    )


def test_another_target_or_shard_size_changes_the_contract(
    toy_target: Target, tmp_path: Path
) -> None:
    def saved(seed: int) -> Target:
        folder = tmp_path / str(seed)
        make_target(seed=seed).model.save_pretrained(folder)
        return Target.load(folder, "float32")

    one, other = saved(1), saved(2)
    assert contract_for(one, CHATS, FEATURES) == contract_for(saved(1), CHATS, FEATURES)
    assert (
        contract_for(one, CHATS, FEATURES).target_hash
        != contract_for(other, CHATS, FEATURES).target_hash
    )
    wider = replace(FEATURES, rows_per_shard=64)
    assert contract_for(toy_target, CHATS, wider) != contract_for(toy_target, CHATS, FEATURES)


def test_the_same_data_again_makes_no_shard_again(
    toy_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(toy_target, tmp_path)
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("shard-*")}
    make(toy_target, tmp_path)
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("shard-*")} == before


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
    """DEFECTS 22: kill -9 in the middle of a shard, at random moments, and just before the manifest."""
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    assert children.run(children.precompute_slowly, unbroken) == 0
    expected = shard_files(unbroken)
    assert len(expected) > 9

    def finished() -> dict[str, int]:
        return {path.name: path.stat().st_mtime_ns for path in broken.glob("shard-*")}

    def soon_after(count: int, delay: float) -> bool:
        if len(finished()) < count:
            return False
        time.sleep(delay)
        return True

    assert (
        children.run(children.precompute_slowly, broken, "before the contract") == -signal.SIGKILL
    )
    assert children.run(children.precompute_slowly, broken, "half a shard") == -signal.SIGKILL
    assert len(finished()) == 2
    first = finished()
    rng = random.Random(0)
    for count in (3, 5, 6):
        delay = rng.uniform(0, 2 * children.SLOW)
        status = children.run(
            children.precompute_slowly, broken, kill_when=lambda c=count, d=delay: soon_after(c, d)
        )
        assert status == -signal.SIGKILL
        assert count <= len(finished()) < len(expected) - 1
        assert not (broken / NAME).exists()
        with pytest.raises(UserError, match="must be complete"):
            FeatureStore(broken)
    assert (
        children.run(children.precompute_slowly, broken, "before the manifest") == -signal.SIGKILL
    )
    assert len(finished()) == len(expected) - 1
    assert children.run(children.precompute_slowly, broken) == 0
    assert shard_files(broken) == expected
    assert first.items() <= finished().items(), "work that was done is not done again"


def test_half_written_files_of_a_killed_run_are_cleared_away(tmp_path: Path) -> None:
    assert children.run(children.precompute_slowly, tmp_path, "half a shard") == -signal.SIGKILL
    assert children.run(children.precompute_slowly, tmp_path) == 0
    left = [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]
    assert left == []


@dataclass(frozen=True)
class Meeting(Ranks):
    """A rank that is a thread: all of them meet at a barrier."""

    barrier: threading.Barrier = field(default_factory=lambda: threading.Barrier(1))
    late_for: Path | None = None  # once past the first barrier, sleep until this file is there

    def wait(self) -> None:
        self.barrier.wait(timeout=30)
        if self.late_for is not None:
            end = time.monotonic() + 10
            while not self.late_for.is_file() and time.monotonic() < end:
                time.sleep(0.001)


def on_ranks(target: Target, out: Path, world: int, late_for: Path | None = None) -> None:
    barrier = threading.Barrier(world)
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        try:
            make(target, out, ranks=Meeting(rank, world, barrier, late_for if rank else None))
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
            made.append((threading.current_thread().name, path.name)),
            write(path, *rest),
        )[1],
    )
    on_ranks(toy_target, tmp_path, 2)
    shards = [name for _, name in made]
    assert (
        sorted(shards)
        == sorted(set(shards))
        == [path.name for path in sorted(tmp_path.glob("shard-*"))]
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
    assert sorted(made[0] + made[1]) == [path.name for path in sorted(tmp_path.glob("shard-*"))]
    assert shard_files(two_ranks.folder / "features") == shard_files(tmp_path)


def test_random_chats_have_prompt_and_answer() -> None:
    """The data of these tests: every chat has tokens with and without loss."""
    assert all(0 < sum(chat.loss_mask) < len(chat.tokens) for chat in conversations(50, seed=9))
