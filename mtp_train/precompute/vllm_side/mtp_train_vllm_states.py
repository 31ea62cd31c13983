"""Runs in vLLM's environment: the target's residual streams and greedy choices of given token sequences.

A program of its own, since an engine's environment is not ours: it imports vLLM, torch and safetensors and nothing of
this package. Jobs come as JSON lines on standard input, `{"sequences": [[ids], ...], "out": FILE}`; each is answered by
one JSON line once FILE holds, for all rows end to end, `states` [T, layers, D] and `choices` int32 [T], vLLM's own
greedy token of each row. An empty line ends the program.

    python mtp_train_vllm_states.py '{"model": FOLDER, "layers": [30], "scratch": FOLDER, "engine": {...}}'
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    extract_from_kv_cache,
)
from vllm.platforms import current_platform

CONNECTOR = "StatesConnector"


class StatesConnector(ExampleHiddenStatesConnector):
    """vLLM's own connector copies through pinned memory and CUDA streams; without a GPU there is nothing to overlap."""

    def _submit_async_write(self, pending: Any) -> None:
        if not current_platform.is_cpu():
            super()._submit_async_write(pending)
            return
        import torch
        from safetensors.torch import save_file

        block = torch.tensor(pending.block_ids)[:, None] * self._block_size
        slots = (block + torch.arange(self._block_size)).flatten()
        rows = pending.token_ids.shape[0]
        states = extract_from_kv_cache(self._kv_cache, slots, rows).contiguous()
        save_file(
            {"hidden_states": states, "token_ids": pending.token_ids.clone()}, pending.filename
        )
        self._req_copy_events[pending.req_id] = _Done()
        descriptor = self._lock_fds.pop(pending.req_id, None)
        if descriptor is not None:
            os.close(descriptor)


class _Done:
    """Stands for the event of a copy that has ended."""

    def query(self) -> bool:
        return True


def main(settings: dict[str, Any]) -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM writes its log to standard output
    from vllm import LLM

    llm = LLM(
        model=settings["model"],
        enable_prefix_caching=False,  # a cache hit would leave out the states of the shared prefix
        speculative_config={
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {
                "hf_config": {"eagle_aux_hidden_state_layer_ids": settings["layers"]}
            },
        },
        kv_transfer_config={
            "kv_connector": CONNECTOR,
            "kv_connector_module_path": Path(__file__).stem,
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": settings["scratch"]},
        },
        **settings["engine"],
    )
    print(json.dumps({"ready": True}), file=replies, flush=True)
    for line in sys.stdin:
        if not line.strip():
            break
        job = json.loads(line)
        answer(llm, job["sequences"], Path(job["out"]))
        print(json.dumps({"done": job["out"]}), file=replies, flush=True)


def answer(llm: Any, sequences: list[list[int]], out: Path) -> None:
    """Run one job."""
    import torch
    from safetensors.torch import save_file
    from vllm import SamplingParams, TokensPrompt
    from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
        cleanup_hidden_states,
        load_hidden_states,
    )

    ask = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, detokenize=False)
    prompts = [TokensPrompt(prompt_token_ids=ids) for ids in sequences]
    states, choices = [], []
    for ids, done in zip(sequences, llm.generate(prompts, ask, use_tqdm=False), strict=True):
        path = done.kv_transfer_params["hidden_states_path"]
        found = load_hidden_states(path)
        assert found["token_ids"].tolist() == ids, "states of another request"
        states.append(found["hidden_states"].clone())
        cleanup_hidden_states(path)
        # Entry t is about token t, as row t - 1 chose it; the last row chose the one token that was generated.
        best = [_best(entry) for entry in done.prompt_logprobs[1:]]
        choices += [*best, done.outputs[0].token_ids[0]]
    save_file(
        {"states": torch.cat(states), "choices": torch.tensor(choices, dtype=torch.int32)}, out
    )


def _best(entry: dict[int, Any]) -> int:
    return next(token for token, value in entry.items() if value.rank == 1)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
