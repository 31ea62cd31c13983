"""Rows out of files: every kind that teams have, and every way they break."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from mtp_train.core.errors import UserError
from mtp_train.text import json_values
from mtp_train.text.files import read_file, read_source
from mtp_train.text.json_values import NOT_JSON
from mtp_train.text.rows import Fault, Row

ROWS = [
    {"id": "a", "conversations": [{"from": "human", "value": "Grün?"}]},
    {"id": "b", "conversations": [{"from": "human", "value": "日本 😀"}]},
    {"id": "c", "text": "x" * 50, "n": 12},
]


def lines(rows: list[Any]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def values(path: Path | str) -> list[Any]:
    return [row.value for row in read_source(str(path))]


def write(path: Path, text: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


# --- kinds ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("rows.jsonl", lines(ROWS)),
        ("rows.jsonl", lines(ROWS).replace("\n", "\r\n\r\n")),
        ("rows.jsonl", "\ufeff" + lines(ROWS)),
        ("rows", lines(ROWS)),
        ("rows.json", lines(ROWS)),
        ("rows.json", json.dumps(ROWS)),
        ("rows.json", json.dumps(ROWS, indent=1, ensure_ascii=False)),
        ("rows.json", "\ufeff\n" + json.dumps(ROWS)),
        ("rows.jsonl", json.dumps(ROWS)),
        ("rows.jsonl", "\n\n".join(json.dumps(row, indent=2) for row in ROWS)),
        ("rows.json", json.dumps({"version": 1, "data": ROWS, "note": [1, 2]})),
        ("rows.json", json.dumps({"version": 1, "rows": ROWS}, indent=4)),
    ],
    ids=[
        "lines",
        "windows lines",
        "byte order mark",
        "no suffix",
        "lines called json",
        "array",
        "indented array",
        "array after a mark",
        "array called lines",
        "indented rows",
        "wrapped",
        "wrapped and indented",
    ],
)
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzipped"])
@pytest.mark.parametrize("block", [61, 1 << 20])
def test_json_is_read_however_it_is_laid_out(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    text: str,
    packed: bool,
    block: int,
) -> None:
    """Blocks of any size: values and characters are cut anywhere."""
    monkeypatch.setattr(json_values, "BLOCK", block)
    data = gzip.compress(text.encode()) if packed else text.encode()
    assert values(write(tmp_path / name, data)) == ROWS


def test_a_single_object_is_a_row(tmp_path: Path) -> None:
    for text in (json.dumps(ROWS[0]), json.dumps(ROWS[0], indent=1)):
        assert values(write(tmp_path / "row.json", text)) == ROWS[:1]


def test_places_are_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", "\n" + lines(ROWS[:1]) + "\n" + lines(ROWS[1:]))
    assert [row.place for row in read_file(path)] == [f"{path}:{n}" for n in (2, 4, 5)]
    path = write(tmp_path / "rows.json", "[\n" + ",\n".join(map(json.dumps, ROWS)) + "\n]")
    assert [row.place for row in read_file(path)] == [f"{path}:{n}" for n in (2, 3, 4)]


TABLE = [
    {"id": "a", "messages": [{"role": "user", "content": "Hi", "weight": None}]},
    {"id": None, "messages": [{"role": "user", "content": None, "weight": 1}]},
] * 300
TABLE_ROWS = [
    {"id": "a", "messages": [{"role": "user", "content": "Hi"}]},
    {"messages": [{"role": "user", "weight": 1}]},
] * 300


def test_tables_give_rows_without_the_keys_that_they_lack(tmp_path: Path) -> None:
    table = pyarrow.Table.from_pylist(TABLE)
    parquet.write_table(table, tmp_path / "t.parquet")
    with pyarrow.ipc.new_file(tmp_path / "file.arrow", table.schema) as writer:
        writer.write_table(table)
    with pyarrow.ipc.new_stream(tmp_path / "stream.arrow", table.schema) as writer:
        writer.write_table(table)
    for name in ("t.parquet", "file.arrow", "stream.arrow"):
        assert values(tmp_path / name) == TABLE_ROWS
    place = [row.place for row in read_file(tmp_path / "t.parquet")][-1]
    assert place == f"{tmp_path / 't.parquet'}[599]"


def test_data_sets_saved_to_disk_and_hub_names_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    from datasets import Dataset, DatasetDict, disable_progress_bars

    disable_progress_bars()
    data = Dataset.from_list(TABLE)
    data.save_to_disk(str(tmp_path / "one"))
    DatasetDict({"train": data, "test": data.select(range(2))}).save_to_disk(str(tmp_path / "two"))
    assert values(tmp_path / "one") == TABLE_ROWS
    assert values(tmp_path / "two") == TABLE_ROWS
    assert len(list(read_source(str(tmp_path / "two"), split="test"))) == 2
    with pytest.raises(UserError, match="a split must exist"):
        list(read_source(str(tmp_path / "two"), split="dev"))
    write(tmp_path / "hub" / "train.jsonl", lines(ROWS[:2]))
    assert values(f"hub:{tmp_path / 'hub'}") == ROWS[:2]
    with pytest.raises(UserError, match="a hub's data set must load"):
        values(f"hub:{tmp_path / 'hub' / 'nowhere'}")


def test_folders_and_globs_give_their_files_in_order(tmp_path: Path) -> None:
    write(tmp_path / "b" / "2.jsonl", lines(ROWS[2:]))
    write(tmp_path / "a" / "1.jsonl.gz", gzip.compress(lines(ROWS[:1]).encode()))
    write(tmp_path / "a" / "3.json", json.dumps(ROWS[1:2]))
    write(tmp_path / "README.md", "no rows")
    write(tmp_path / ".hidden" / "4.jsonl", lines(ROWS))
    assert values(tmp_path) == ROWS
    assert values(f"{tmp_path}/*/*.json*") == ROWS
    assert values(f"{tmp_path}/**/2.jsonl") == ROWS[2:]


@pytest.mark.parametrize("name", ["none.jsonl", "*.jsonl", "folder"])
def test_what_is_not_there_is_an_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match="a data file must exist"):
        values(tmp_path / name)


# --- damage ---------------------------------------------------------------------------------------------------


def faults(rows: Iterator[Row]) -> list[tuple[str, str]]:
    """(place after the folder, reason) of the faults."""
    return [
        (Path(row.place).name, row.value.reason) for row in rows if isinstance(row.value, Fault)
    ]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"id": "x", "conv', NOT_JSON),
        (b'{"text": "caf\xe9"}', NOT_JSON),
        (b"{'id': 'x'}", "a Python literal, not JSON"),
        (b"// exported on Monday", "a comment, not a row"),
        (b"# exported on Monday", "a comment, not a row"),
        (b'{"id": "x", "text": "a", "text": "b"}', "a key twice in one JSON object"),
        (b'{"n": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", NOT_JSON),
        (b'{"n": ' + b"9" * 5000 + b"}", NOT_JSON),
    ],
)
def test_a_damaged_line_costs_only_itself(tmp_path: Path, line: bytes, reason: str) -> None:
    good = lines(ROWS[:1]).encode()
    for number, text in ((2, good + line + b"\n" + good), (1, line + b"\n" + good)):
        path = write(tmp_path / "rows.jsonl", text)
        rows = list(read_file(path))
        assert faults(iter(rows)) == [(f"rows.jsonl:{number}", reason)]
        assert [row.value for row in rows if not isinstance(row.value, Fault)].count(ROWS[0]) == (
            number
        )


def test_a_damaged_array_keeps_what_stands_before_the_damage(tmp_path: Path) -> None:
    text = json.dumps(ROWS, indent=1)
    path = write(tmp_path / "rows.json", text[: text.index('"c"')])
    assert [row.value for row in read_file(path)][:-1] == ROWS[:2]
    ((place, reason),) = faults(read_file(path))
    assert reason == f"{NOT_JSON}; the rest of the file is lost"
    assert int(place.split(":")[1]) >= text[: text.index('"c"')].count("\n")
    path = write(tmp_path / "rows.json", text.encode("utf-16"))
    assert len(faults(read_file(path))) >= 1


def test_damaged_files_cost_only_themselves(tmp_path: Path) -> None:
    table = pyarrow.Table.from_pylist(TABLE)
    parquet.write_table(table, tmp_path / "t.parquet")
    with pyarrow.ipc.new_stream(tmp_path / "s.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=300)
    whole, stream = (tmp_path / "t.parquet").read_bytes(), (tmp_path / "s.arrow").read_bytes()
    write(tmp_path / "t.parquet", whole[: len(whole) // 2])
    write(tmp_path / "s.arrow", stream[:-600])
    packed = gzip.compress(lines([{"id": i, "text": str(i) * 9} for i in range(5000)]).encode())
    write(tmp_path / "g.jsonl.gz", packed[: len(packed) // 2])
    write(
        tmp_path / "l.jsonl", "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"
    )
    write(tmp_path / "e.jsonl", "")
    write(tmp_path / "n.jsonl", "\n\r\n \n")
    write(tmp_path / "z.jsonl", lines(ROWS))
    found = dict(faults(read_source(str(tmp_path))))
    names = {place.split(":")[0].split("[")[0]: reason for place, reason in found.items()}
    assert names["t.parquet"].startswith("a damaged table")
    assert names["s.arrow"].startswith("a damaged table")
    assert names["g.jsonl.gz"].startswith("a file that breaks off")
    assert names["l.jsonl"] == "a Git LFS pointer instead of the data"
    assert set(names) == {"t.parquet", "s.arrow", "g.jsonl.gz", "l.jsonl"}
    assert values(tmp_path)[-3:] == ROWS
    kept = [row for row in read_file(tmp_path / "g.jsonl.gz") if not isinstance(row.value, Fault)]
    assert 100 < len(kept) < 5000
    assert kept[-1].value["id"] == len(kept) - 1


@pytest.mark.parametrize("kind", ["stream", "file", "parquet"])
def test_flipped_bytes_of_a_table_are_a_fault_at_most(tmp_path: Path, kind: str) -> None:
    """A wrong offset in an Arrow file points anywhere: unchecked, reading it ends the process."""
    table = pyarrow.Table.from_pylist(TABLE[:40])
    path = tmp_path / "t.arrow"
    if kind == "parquet":
        parquet.write_table(table, path)
    else:
        make = {"stream": pyarrow.ipc.new_stream, "file": pyarrow.ipc.new_file}[kind]
        with make(path, table.schema) as writer:
            writer.write_table(table)
    whole, random = path.read_bytes(), Random(1)
    damaged = 0
    for _ in range(150):
        data = bytearray(whole)
        data[random.randrange(8, len(data))] = random.randrange(256)
        path.write_bytes(data)
        damaged += bool(faults(read_file(path)))
    assert damaged


def test_a_file_of_another_kind_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.tsv", "id\tprompt\n1\tHi\n")
    assert faults(read_file(path)) == [("rows.tsv", "a file of unknown kind (.tsv)")]


def test_a_damaged_saved_data_set_is_a_fault(tmp_path: Path) -> None:
    write(tmp_path / "set" / "state.json", "{")
    ((place, reason),) = faults(read_source(str(tmp_path / "set")))
    assert (place, reason.split(":")[0]) == ("set", "a damaged data set")


def test_a_long_array_is_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first row comes before the file is read: an open array gives its rows."""
    monkeypatch.setattr(json_values, "BLOCK", 64)
    path = write(tmp_path / "rows.json", "[" + json.dumps(ROWS[0]) + ", " + '{"id": ' * 1000)
    assert next(read_file(path)).value == ROWS[0]
    assert len(faults(read_file(path))) == 1
