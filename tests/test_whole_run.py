"""A whole run says which stage it is at and how long the rest will take."""

from __future__ import annotations

import pytest

from mtp_train.cli import whole_run
from mtp_train.cli.whole_run import Timetable
from mtp_train.core.progress import progress

EXPECTED = {"regenerate": 100.0, "train": 200.0, "export": 10.0}


class Clock:
    """A clock that tests set."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(whole_run, "time", found)
    return found


def run(table: Timetable, clock: Clock, stage: str, seconds: float) -> None:
    def work() -> None:
        clock.now += seconds

    table.run(stage, work)


def test_the_time_left_is_scaled_to_this_machine(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    table = Timetable(list(EXPECTED), EXPECTED)
    run(table, clock, "regenerate", 300)  # three times as slow
    run(table, clock, "train", 600)
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "run: stage 1/3, regenerate, about 5 min left (regenerate, train, export)"
    assert "stage 2/3, train, about 10 min left" in said[1]
    assert table.left() == 30


def test_a_stage_that_was_done_before_does_not_make_the_rest_look_quick(clock: Clock) -> None:
    table = Timetable(list(EXPECTED), EXPECTED)
    run(table, clock, "regenerate", 0.1)
    assert table.left() == 210


def test_without_measured_seconds_no_time_is_said(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    table = Timetable(list(EXPECTED), {"train": 3.0})
    run(table, clock, "regenerate", 1)
    assert capsys.readouterr().err == "run: stage 1/3, regenerate (regenerate, train, export)\n"


def test_bars_bear_the_stages_place(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        with progress(1, "answers", "answer") as bar:
            bar.update()

    Timetable(list(EXPECTED), {}).run("train", work)
    assert "[2/3] answers" in capsys.readouterr().err
    with progress(1, "answers", "answer"):
        pass
    assert "[" not in capsys.readouterr().err.split("answers")[0]
