"""Tensors in one safetensors object, read by rows: the header first, then only the bytes of the rows asked for.

The format is https://huggingface.co/docs/safetensors: eight bytes of header length, the header in JSON, the data.
Knows no store and no state.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import torch
from safetensors.torch import save
from torch import Tensor

from mtp_train.store.places import Bytes

DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
}
NOTE = "note"  # the one metadata key: the library writes several in no fixed order, and bytes must not vary


def pack(tensors: dict[str, Tensor], note: object) -> bytes:
    """A safetensors object of `tensors` and a JSON note. The same input gives the same bytes."""
    text = json.dumps(note, ensure_ascii=False, separators=(",", ":"))
    return bytes(
        save({name: tensor.contiguous() for name, tensor in tensors.items()}, {NOTE: text})
    )


class TensorFile:
    """An opened object. Raises `ValueError` if it is not a whole safetensors file."""

    def __init__(self, data: Bytes) -> None:
        self._data, self.bytes = data, data.size
        if data.size < 8:
            raise ValueError(f"{data.size} bytes are no header")
        (head,) = data.read([(0, 8)])
        self._base = 8 + int.from_bytes(head.tobytes(), "little")
        if self._base > data.size:
            raise ValueError(f"its header ends at byte {self._base} of {data.size}")
        (header,) = data.read([(8, self._base)])
        self._header = json.loads(header.tobytes())
        self.note = json.loads(self._header.pop("__metadata__", {}).get(NOTE, "null"))
        end = max((entry["data_offsets"][1] for entry in self._header.values()), default=0)
        if self._base + end != data.size:
            raise ValueError(f"its tensors end at byte {self._base + end} of {data.size}")

    def rows(self, name: str) -> int:
        """Length of a tensor's first dimension."""
        return int(self._entry(name)["shape"][0])

    def whole(self, name: str) -> Tensor:
        return self.cut([(name, 0, self.rows(name))])[0]

    def bytes_of(self, name: str) -> int:
        """Bytes of a tensor and of those named `<name>.<part>`."""
        spans = [
            entry["data_offsets"]
            for other, entry in self._header.items()
            if other == name or other.startswith(f"{name}.")
        ]
        return sum(stop - start for start, stop in spans)

    def cut(self, parts: Sequence[tuple[str, int, int]]) -> list[Tensor]:
        """Rows [start, stop) of each named tensor: views of a local file's map, one joint read of a remote one."""
        spans = []
        for name, start, stop in parts:
            entry = self._entry(name)
            if not 0 <= start <= stop <= entry["shape"][0]:
                raise ValueError(f"rows {start} to {stop} of {name} {entry['shape']}")
            row = DTYPES[entry["dtype"]].itemsize * math.prod(entry["shape"][1:])
            first = self._base + entry["data_offsets"][0]
            spans.append((first + start * row, first + stop * row))
        return [
            torch.from_numpy(piece)
            .view(DTYPES[self._entry(name)["dtype"]])
            .reshape(stop - start, *self._entry(name)["shape"][1:])
            for piece, (name, start, stop) in zip(self._data.read(spans), parts, strict=True)
        ]

    def _entry(self, name: str) -> dict:
        if name not in self._header:
            raise ValueError(f"it has no tensor {name}")
        entry: dict = self._header[name]
        return entry
