"""States from vLLM, for targets that our engine does not run: its own hidden-state extraction, in its own environment.

vLLM gives residual streams (`layer_<k>`; the last one is `pre_norm`) and its greedy token of every row. The final norm
is applied here, with the target's own weights. The gate holds the result against vLLM's tokens.

Tried with vLLM 0.32 on a CPU. Prefix caching is off: a hit would leave out the states of the shared prefix.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from mtp_train.core.errors import UserError
from mtp_train.core.owned import remove_file
from mtp_train.core.records import TokenizedConversation
from mtp_train.models.readout import Readout
from mtp_train.models.target import POST_NORM, layer_of
from mtp_train.precompute.gate import (
    PIECE,
    GateResult,
    Sample,
    choices,
    compare_logits,
    compare_states,
)
from mtp_train.precompute.sources import VllmConfig, expand_states

PROGRAM = Path(__file__).parent / "vllm_side" / "mtp_train_vllm_states.py"


class VllmStates:
    """A state source over a vLLM process. Close it, or use it as a context."""

    name = "vllm"

    def __init__(
        self, readout: Readout, config: VllmConfig, dtype: str, states: Sequence[str]
    ) -> None:
        self.readout = readout
        self.states = expand_states(states, readout.layers)
        self.target_hash, self.quantisation = readout.hash, readout.quantisation
        self.identity = readout.identity
        self.vocab_size, self.hidden_size = readout.lm_head_VD.shape
        self.dtype = dtype
        # The last layer is always captured: the gate needs it.
        self._layers = sorted({self._layer(name) for name in self.states} | {readout.layers})
        self._scratch = tempfile.TemporaryDirectory(prefix="mtp_train_vllm_")
        self._log = Path(self._scratch.name) / "vllm.log"
        self._process = self._start(config)

    def __enter__(self) -> VllmStates:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def capture(self, sequences: Sequence[TokenizedConversation]) -> dict[str, Tensor]:
        """Each state's rows end to end [T, D]. vLLM batches the sequences as it likes."""
        streams, _ = self._ask([list(sequence.tokens) for sequence in sequences])
        return {name: self._state(name, streams) for name in self.states}

    def check(self, samples: Sequence[Sample], result: GateResult) -> None:
        """vLLM reads each sample again, alone; its greedy tokens must be those of the captured states."""
        for sample in samples:
            streams, choices = self._ask([list(sample.tokens)])
            last = self.readout.normed(streams[self.readout.layers])
            post_LD = sample.captured.get(POST_NORM, last)
            result.ties += self._compare(sample.key, post_LD, choices)
            for name, state_LD in sample.captured.items():
                if name != POST_NORM:
                    compare_states(name, sample.key, state_LD, streams[self._layer(name)])
            result.sequences += 1
            result.rows += len(choices)

    def check_reference(self, tokens: Sequence[int]) -> dict[str, Any]:
        """Nothing: vLLM runs targets that may not fit into transformers here; its own tokens are compared."""
        return {}

    def close(self) -> None:
        """End vLLM."""
        if self._process.poll() is None:
            assert self._process.stdin
            try:
                self._process.stdin.write("\n")
                self._process.stdin.flush()
                self._process.wait(60)
            except (OSError, subprocess.TimeoutExpired):
                self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream:
                with suppress(BrokenPipeError):  # a job that the process never read
                    stream.close()
        self._scratch.cleanup()

    def _layer(self, state: str) -> int:
        return self.readout.layers if state == POST_NORM else layer_of(state, self.readout.layers)

    def _state(self, name: str, streams: dict[int, Tensor]) -> Tensor:
        stream_TD = streams[self._layer(name)]
        return self.readout.normed(stream_TD) if name == POST_NORM else stream_TD

    def _compare(self, key: str, post_LD: Tensor, choices_L: Tensor) -> int:
        ties = 0
        for start in range(0, len(choices_L), PIECE):
            part = slice(start, start + PIECE)
            logits = self.readout.logits(post_LD[part])
            chosen, expected = choices(logits), choices_L[part].long()
            differ, wrong = compare_logits(logits, chosen, expected)
            if bool(wrong.any()):
                row = int(wrong.nonzero()[0])
                raise UserError(
                    "argmax(lm_head(stored row)) must be vLLM's own token",
                    f"row {start + row} of sequence {key!r}: stored chooses {int(chosen[row])}, "
                    f"vLLM {int(expected[row])}",
                    "check that vLLM serves this target without quantisation of its own",
                )
            ties += int(differ.sum())
        return ties

    def _start(self, config: VllmConfig) -> subprocess.Popen[str]:
        engine = {"dtype": self.dtype, "enforce_eager": True} | config.engine
        settings = {
            "model": str(self.readout.path.resolve()),
            "layers": self._layers,
            "scratch": self._scratch.name,
            "engine": engine,
        }
        environment = os.environ | {"PYTHONPATH": str(PROGRAM.parent)}
        try:
            with open(self._log, "w") as log:
                process = subprocess.Popen(
                    [config.python, str(PROGRAM), json.dumps(settings)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    env=environment,
                )
        except OSError as error:
            self._scratch.cleanup()
            raise UserError(
                "precompute.vllm.python must be an interpreter whose environment holds vLLM",
                f"{config.python} ({error.strerror})",
                "name .venv-serving/bin/python, or another one",
            ) from error
        self._process = process
        self._reply()
        return process

    def _ask(self, sequences: list[list[int]]) -> tuple[dict[int, Tensor], Tensor]:
        """Residual streams by layer [T, D], and vLLM's choices [T]."""
        out = Path(self._scratch.name) / "job.safetensors"
        assert self._process.stdin
        with suppress(BrokenPipeError):  # the reply says why
            self._process.stdin.write(json.dumps({"sequences": sequences, "out": str(out)}) + "\n")
            self._process.stdin.flush()
        self._reply()
        found = load_file(out)
        remove_file(out)
        states_TLD = found["states"]
        streams = {layer: states_TLD[:, at].contiguous() for at, layer in enumerate(self._layers)}
        return streams, found["choices"]

    def _reply(self) -> None:
        assert self._process.stdout
        if self._process.stdout.readline():
            return
        self._process.wait()
        lines = [line for line in self._log.read_text().splitlines() if "Error" in line]
        self.close()
        raise UserError(
            "vLLM must run the target and give its states",
            lines[-1].strip() if lines else "no answer",
            "try the target in vLLM alone, or capture through our engine (precompute.vllm.python='')",
        )
