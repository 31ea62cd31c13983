"""A server answers in the engine's place: the same answers, its faults counted, its absence survived."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from stub_server import StubServer
from test_cli import mistake, save_target
from toys import make_lively_target, make_tokenizer

from mtp_train.cli.main import dispatch, guarded
from mtp_train.core.errors import UserError
from mtp_train.engine.engine import Engine, EngineConfig
from mtp_train.engine.sampling import Sampling
from mtp_train.engine.sequences import Completion, Request
from mtp_train.regenerate import server as serving
from mtp_train.regenerate.server import Server
from mtp_train.regenerate.stage import RegenerateConfig, regenerate
from mtp_train.text.template import ChatTemplate

TOKENIZER = make_tokenizer()
STOP = frozenset({2})
TEXTS = ["why?", "name a bird.", "say hello", "count to 3", "is it late?", "what is 2 + 2?"]


@pytest.fixture
def engine() -> Engine:
    return Engine(
        make_lively_target(), None, EngineConfig(max_batch=3, cache_rows=1024, page_size=4)
    )


@pytest.fixture
def stub(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[StubServer]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    found = StubServer(engine, TOKENIZER)
    yield found
    found.close()


def connected(stub: StubServer, **changes: Any) -> Server:
    settings: dict[str, Any] = {"concurrency": 3, "timeout": 30.0, "retries": 2, "pause": 0.001}
    server = Server(stub.address, **(settings | changes))
    server.connect(TOKENIZER)
    stub.bodies.clear()
    return server


def prompts(folder: Path) -> RegenerateConfig:
    """Single questions and, the last three, pairs."""
    rows = []
    for number, text in enumerate(TEXTS):
        messages = [{"role": "user", "content": text}]
        if number >= 3:
            messages += [{"role": "user", "content": "and then?"}]
        rows.append({"id": f"p{number}", "messages": messages})
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return RegenerateConfig({"train": str(path)}, {}, max_new_tokens=8)


def ids(rows: list[dict[str, Any]]) -> list[str]:
    return [row["id"] for row in rows]


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def text_ids(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text, add_special_tokens=False))


def asks(prompt: tuple[int, ...], text: str) -> bool:
    """Whether the prompt's last question is `text`."""
    return TOKENIZER.decode(list(prompt)).endswith(f"{text}</s>\n<s>assistant\n")


def test_a_server_gives_the_engines_answers(
    stub: StubServer, engine: Engine, tmp_path: Path
) -> None:
    config = prompts(tmp_path)
    ours, theirs = tmp_path / "ours.jsonl", tmp_path / "theirs.jsonl"
    want = regenerate(engine, ChatTemplate(TOKENIZER), STOP, config, "train", ours)
    got = regenerate(connected(stub), ChatTemplate(TOKENIZER), STOP, config, "train", theirs)
    assert theirs.read_bytes() == ours.read_bytes()
    assert got == want
    assert {row["finish"] for row in read(ours)} == {"stop", "length"}
    assert len(stub.bodies) == len(read(ours)) == 9


def test_sampling_is_asked_for_in_full_and_a_seed_per_answer(
    stub: StubServer, tmp_path: Path
) -> None:
    """A server's own defaults, from the model's generation config, must not take part."""
    config = prompts(tmp_path)
    regenerate(
        connected(stub), ChatTemplate(TOKENIZER), STOP, config, "train", tmp_path / "greedy.jsonl"
    )
    assert all(body["temperature"] == 0 and "seed" not in body for body in stub.bodies)
    stub.bodies.clear()
    config = RegenerateConfig(config.prompts, {}, max_new_tokens=8, temperature=0.7)
    regenerate(
        connected(stub), ChatTemplate(TOKENIZER), STOP, config, "train", tmp_path / "sampled.jsonl"
    )
    assert len({body["seed"] for body in stub.bodies}) == len(stub.bodies) == 9
    for body in stub.bodies:
        assert body["temperature"] == 0.7 and body["model"] == "toy"
        assert (body["top_p"], body["top_k"], body["repetition_penalty"]) == (1, 0, 1)
        assert frozenset(body["stop_token_ids"]) == STOP


@pytest.mark.parametrize(
    "fault", ["500", "429", "not JSON", "break", "other count", "lost token", "no ids", "hang"]
)
def test_a_fault_that_passes_leaves_no_trace(
    stub: StubServer, engine: Engine, tmp_path: Path, fault: str
) -> None:
    config = prompts(tmp_path)
    ours, theirs = tmp_path / "ours.jsonl", tmp_path / "theirs.jsonl"
    regenerate(engine, ChatTemplate(TOKENIZER), STOP, config, "train", ours)
    server = connected(stub, timeout=3.0 if fault == "hang" else 30.0)
    stub.fault = lambda prompt, before: fault if asks(prompt, TEXTS[1]) and not before else ""
    outcome = regenerate(server, ChatTemplate(TOKENIZER), STOP, config, "train", theirs)
    assert theirs.read_bytes() == ours.read_bytes()
    assert not outcome.errors
    assert len(stub.bodies) == 10


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("500", "HTTP 500"),
        ("not JSON", "Expecting value"),
        ("break", "broken connection"),
        ("other prompt", "another prompt"),
        ("other count", "another prompt"),
        ("lost token", "counts of tokens"),
        ("no ids", "without token ids"),
        ("no end", "without the end-of-turn token"),
        ("abort", "ended with 'abort'"),
        ("two choices", "without a choice"),
    ],
)
def test_a_fault_that_stays_costs_its_prompt_alone(
    stub: StubServer, tmp_path: Path, fault: str, reason: str
) -> None:
    config = prompts(tmp_path)
    server = connected(stub, retries=1)
    stub.fault = lambda prompt, before: fault if asks(prompt, TEXTS[1]) else ""
    out = tmp_path / "out.jsonl"
    # without stop tokens no answer ends with one
    outcome = regenerate(server, ChatTemplate(TOKENIZER), frozenset(), config, "train", out)
    counts = outcome.as_dict()
    assert (counts["input"], counts["success"], counts["skipped"], counts["error"]) == (6, 5, 0, 1)
    (said,) = outcome.errors
    assert reason in said and outcome.accounting.examples[said] == "p1"
    assert "p1" not in ids(read(out)) and len(read(out)) == 8


def test_a_later_turn_that_fails_leaves_the_first(stub: StubServer, tmp_path: Path) -> None:
    config = prompts(tmp_path)
    server = connected(stub, retries=0)
    stub.fault = lambda prompt, _: "500" if asks(prompt, "and then?") else ""
    out = tmp_path / "out.jsonl"
    outcome = regenerate(server, ChatTemplate(TOKENIZER), STOP, config, "train", out)
    assert ids(read(out)) == ["p0", "p1", "p2", "p3", "p4", "p5"]
    assert outcome.accounting.used == 3 and not outcome.errors
    assert outcome.accounting.repaired == {
        "ended early, the turns before are kept: server: HTTP 500": 3
    }


def test_refusals_are_skipped_under_one_reason(stub: StubServer, tmp_path: Path) -> None:
    """The server's message names each prompt's length; the reason does not."""
    config = prompts(tmp_path)
    stub.limit = len(text_ids("<s>user\nname a bird.</s>\n<s>assistant\n")) + 4
    server = connected(stub)
    stub.fault = lambda prompt, _: "400" if asks(prompt, TEXTS[0]) or asks(prompt, TEXTS[2]) else ""
    out = tmp_path / "out.jsonl"
    outcome = regenerate(server, ChatTemplate(TOKENIZER), frozenset(), config, "train", out)
    counts = outcome.as_dict()
    assert counts["input"] == 6 and counts["error"] == 0
    assert outcome.accounting.refused["the server refuses it: HTTP 400 prompt of N tokens, no"] == 2
    room = stub.limit - len(read(out)[0]["prompt_ids"])
    assert len(read(out)[0]["output_ids"]) == min(8, room) == 4


def test_a_server_that_went_away_stops_the_run_and_the_answers_stay(
    stub: StubServer, engine: Engine, tmp_path: Path
) -> None:
    config = prompts(tmp_path)
    ours, out = tmp_path / "ours.jsonl", tmp_path / "out.jsonl"
    regenerate(engine, ChatTemplate(TOKENIZER), STOP, config, "train", ours)
    server = connected(stub, concurrency=1, retries=1)
    real = stub.answer

    def answer_and_leave(body: dict[str, Any]) -> tuple[int, Any]:
        if len(stub.bodies) == 4:
            stub.http.shutdown()  # nobody listens from here on
            stub.http.server_close()
        return real(body)

    stub.answer = answer_and_leave  # type: ignore[method-assign]
    with pytest.raises(UserError, match=r"must answer.*answers so far are kept"):
        regenerate(server, ChatTemplate(TOKENIZER), STOP, config, "train", out)
    assert len(read(out.with_suffix(".journal"))) == 5
    again = StubServer(engine, TOKENIZER)
    try:
        regenerate(connected(again), ChatTemplate(TOKENIZER), STOP, config, "train", out)
        assert len(again.bodies) == 4
    finally:
        again.close()
    assert out.read_bytes() == ours.read_bytes()


def test_a_server_that_fails_every_request_stops_the_run(
    stub: StubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "GIVE_UP", 4)
    config = prompts(tmp_path)
    server = connected(stub, retries=0, concurrency=1)
    stub.fault = lambda *_: "502"
    with pytest.raises(UserError, match="4 failures one after the other"):
        regenerate(server, ChatTemplate(TOKENIZER), STOP, config, "train", tmp_path / "out.jsonl")
    assert len(stub.bodies) == 4


@pytest.mark.parametrize(
    ("fault", "rule"),
    [
        ("no ids", "must return token ids"),
        ("other prompt", "tokenizer must be the target's"),
        ("404", "must take our requests"),
        ("500", "must take our requests"),
        ("not JSON", "OpenAI-compatible"),
        ("two choices", "OpenAI-compatible"),
        ("break", "must answer"),
    ],
)
def test_a_server_that_will_not_do_is_refused_before_the_first_prompt(
    stub: StubServer, fault: str, rule: str
) -> None:
    stub.fault = lambda *_: fault
    with pytest.raises(UserError, match=rule):
        connected(stub)


def test_another_tokenizer_is_refused(stub: StubServer) -> None:
    """Token ids go through untouched; only the text probe shows it."""

    class Shifted:
        def encode(self, text: str, **_: object) -> list[int]:
            return [(token + 1) % 50 for token in text_ids(text)]

    stub.tokenizer = Shifted()  # type: ignore[assignment]
    with pytest.raises(UserError, match="tokenizer must be the target's"):
        connected(stub)


def test_addresses_and_models_that_are_not_there(stub: StubServer) -> None:
    with pytest.raises(UserError, match="one that the server has"):
        connected(stub, model="other")
    with pytest.raises(UserError, match="OpenAI-compatible"):
        Server(stub.address.removesuffix("/v1")).connect(TOKENIZER)
    stub.close()
    with pytest.raises(UserError, match="start it again"):
        Server(stub.address).connect(TOKENIZER)


def test_requests_run_side_by_side(stub: StubServer) -> None:
    """As many as asked for, and no more."""
    server = connected(stub, concurrency=4)
    gate = threading.Barrier(4)
    real = stub.answer

    def together(body: dict[str, Any]) -> tuple[int, Any]:
        gate.wait(20)  # breaks unless four are in flight
        return real(body)

    stub.answer = together  # type: ignore[method-assign]
    waiting = iter([Request(str(n), (n + 1, 5), 2) for n in range(8)])
    done: list[Completion] = []
    server.serve(lambda: next(waiting, None), done.append, Sampling())
    assert sorted(item.key for item in done) == [str(n) for n in range(8)]
    assert all(item.finish == "length" for item in done)


# --- a key ----------------------------------------------------------------------------------------------------

SECRET = "sk-Very+Secret/9f2="


def keyed(stub: StubServer, folder: Path) -> list[str]:
    """A command line for a server that asks for a key."""
    stub.key = SECRET
    if not (folder / "target").exists():
        save_target(folder / "target")
        prompts(folder)
        held = json.dumps({"id": "h", "messages": [{"role": "user", "content": "held out?"}]})
        (folder / "held.jsonl").write_text(held + "\n")
    return [
        f"target.path={folder / 'target'}",
        "target.dtype=float32",
        f"run={folder / 'run'}",
        f"regenerate.prompts.train={folder / 'prompts.jsonl'}",
        f"regenerate.prompts.heldout={folder / 'held.jsonl'}",
        "regenerate.max_new_tokens=6",
        f"regenerate.server={stub.address}",
    ]


def test_a_servers_key_comes_from_the_environment_and_is_told_nobody(
    stub: StubServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = keyed(stub, tmp_path)
    told = mistake(capsys, "regenerate", *lines)
    assert "HTTP 401" in told and "regenerate.key_env=NAME" in told
    named = [*lines, "regenerate.key_env=OUR_KEY"]
    assert "OUR_KEY that is empty" in mistake(capsys, "regenerate", *named)
    for wrong in ("a\nb", "größe", f"{SECRET}x"):
        monkeypatch.setenv("OUR_KEY", wrong)
        told = mistake(capsys, "regenerate", *named)
        assert "Secret" not in told and "größe" not in told, "not even where the server quotes it"
    assert "HTTP 401" in told

    monkeypatch.setenv("OUR_KEY", f"{SECRET}\n")
    assert guarded(lambda: dispatch("regenerate", named)) == 0
    said = capsys.readouterr()
    assert "6 success" in said.err
    assert "Secret" not in said.out + said.err
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert files and not any(b"Secret" in path.read_bytes() for path in files)

    monkeypatch.delenv("OUR_KEY")
    assert guarded(lambda: dispatch("regenerate", lines)) == 0
    assert "inputs unchanged" in capsys.readouterr().err, "a key changes no answer"


def test_a_key_in_the_place_of_a_name_is_not_shown(
    stub: StubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = mistake(capsys, "evaluate", *keyed(stub, tmp_path), f"regenerate.key_env={SECRET}")
    assert "regenerate.key_env must be the name" in told and "Secret" not in told
