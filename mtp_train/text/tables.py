"""Rows of tables: Parquet, Arrow, data sets that `datasets` saved or that a hub holds. Knows no form of row."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mtp_train.core.errors import UserError
from mtp_train.text.rows import Fault, Row


def read_parquet(path: Path) -> Iterator[Row]:
    yield from _batches(path, _parquet_batches)


def read_arrow(path: Path) -> Iterator[Row]:
    yield from _batches(path, _arrow_batches)


def _batches(path: Path, batches: Callable[[Path], Iterator[Any]]) -> Iterator[Row]:
    import pyarrow

    index = 0
    try:
        for batch in batches(path):
            batch.validate(full=True)  # flipped bits would be read past the end of memory
            for row in batch.to_pylist():
                yield Row(f"{path}[{index}]", _without_null(row))
                index += 1
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0][:120]
        yield Row(f"{path}[{index}]", Fault(f"a damaged table: {reason}", of_file=True))


def _parquet_batches(path: Path) -> Iterator[Any]:
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        yield from file.iter_batches(batch_size=256)


def _arrow_batches(path: Path) -> Iterator[Any]:
    """Either of Arrow's formats: the file (with a footer) and the stream (what `datasets` writes)."""
    from pyarrow import ipc, memory_map

    with memory_map(str(path)) as source:
        is_file = source.read(6) == b"ARROW1"
        source.seek(0)
        if is_file:
            reader = ipc.open_file(source)
            for index in range(reader.num_record_batches):
                yield from _slices(reader.get_batch(index))
        else:
            for batch in ipc.open_stream(source):
                yield from _slices(batch)


def _slices(batch: Any) -> Iterator[Any]:
    """A batch may hold a whole file: turn 256 rows at a time into Python objects."""
    for start in range(0, batch.num_rows, 256):
        yield batch.slice(start, 256)


def is_saved(path: Path) -> bool:
    """Whether `datasets` wrote this folder with save_to_disk."""
    return (path / "dataset_dict.json").is_file() or (path / "state.json").is_file()


def read_saved(path: Path, split: str) -> Iterator[Row]:
    from datasets import DatasetDict, load_from_disk

    try:
        data = load_from_disk(str(path))
    except Exception as error:  # whatever a damaged folder makes the library raise
        yield Row(
            str(path),
            Fault(f"a damaged data set: {str(error).splitlines()[0][:120]}", of_file=True),
        )
        return
    if isinstance(data, DatasetDict):
        if split not in data:
            raise UserError("a split must exist", f"{path}: {split}", f"use one of {list(data)}")
        data = data[split]
    index = 0
    try:
        for index, row in enumerate(data):
            yield Row(f"{path}[{index}]", _without_null(row))
    except Exception as error:  # the library's own readers have no common class either
        reason = (str(error).splitlines() or [type(error).__name__])[0][:120]
        yield Row(f"{path}[{index + 1}]", Fault(f"a damaged data set: {reason}", of_file=True))


def read_hub(dataset: str, split: str, name: str) -> Iterator[Row]:
    """A hub's data set, streamed. No code of the data set is run."""
    from datasets import load_dataset

    try:
        data = load_dataset(dataset, name or None, split=split, streaming=True)
    except Exception as error:  # network, names and formats: the library has no common class
        message = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise UserError(
            "a hub's data set must load",
            f"{dataset} ({name or 'default'}, {split}): {message}",
            "check the name, its configuration and split, and the network",
        ) from error
    yield from (Row(f"{dataset}[{index}]", _without_null(row)) for index, row in enumerate(data))


def _without_null(value: Any) -> Any:
    """A table's row without the keys that it lacks: a column's structure is that of all its rows together."""
    if isinstance(value, dict):
        return {key: _without_null(part) for key, part in value.items() if part is not None}
    return [_without_null(part) for part in value] if isinstance(value, list) else value
