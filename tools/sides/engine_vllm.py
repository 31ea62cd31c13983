"""vLLM's side of tools/bench_engine.py. Runs in the serving environment: standard library, torch and vLLM alone.

    .venv-serving/bin/python tools/sides/engine_vllm.py SPEC

A line is `plain BATCH ROUND`: answered with what the run gave. Everything runs in this process, so that its memory is
the engine's, and no prefix is kept from one run to the next.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from protocol import answer_all, prompts_of


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # as many as are asked for, where the system puts them
        "OMP_NUM_THREADS": str(spec["threads"]),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    import torch
    import vllm

    torch.set_num_threads(spec["threads"])
    llm = vllm.LLM(
        model=spec["target"],
        dtype="bfloat16",
        enforce_eager=not spec["compiled"],
        max_model_len=1024,
        max_num_seqs=max(spec["batches"]),
        enable_prefix_caching=False,
        seed=0,
    )
    sampling = vllm.SamplingParams(
        temperature=0, max_tokens=spec["max_new_tokens"], ignore_eos=True, detokenize=False
    )

    def answer(line: str) -> dict[str, Any]:
        _, batch, number = line.split()
        prompts = prompts_of(spec, int(batch), int(number))
        requests = [vllm.TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        done = llm.generate(requests, sampling, use_tqdm=False)
        outputs = [list(one.outputs[0].token_ids) for one in done]
        return {"tokens": sum(map(len, outputs)), "outputs": outputs}

    about = {"vllm": vllm.__version__, "torch": torch.__version__}
    answer_all(answer, about | {"threads": torch.get_num_threads()})


if __name__ == "__main__":
    main()
