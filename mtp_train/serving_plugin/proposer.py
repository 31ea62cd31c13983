"""Drafting with several modules in vLLM's V1 model runner, whose own proposer runs the first one at every step.

Module s reads token x[r+1+s] of row r. A sequence's last s rows wait for tokens: drafts stand in their places, and the
rows are run again when the tokens are known. So each request keeps the last D-1 rows of module 0, and modules 1, 2, ...
run over them and over the rows that have come since.

    x[0..5] known, D = 3     row  0   1   2   3   4
    module 0                     x1  x2  x3  x4  x5   vLLM's own first pass
    module 1                     x2  x3  x4  x5  d1   d1, d2: this step's drafts
    module 2                     x3  x4  x5  d1  d2

Deeper than D the last module goes on from its own output. (vLLM's V2 runner, for GPUs, runs such rows again by itself.)
Knows no weights. Runs in vLLM's environment.

Shapes: T rows of all requests end to end, B requests, D hidden width, K drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.spec_decode.eagle import EagleProposer
from vllm.v1.spec_decode.utils import PADDING_SLOT_ID

from mtp_train.serving_plugin.rows import Rows


def install() -> None:
    """Let vLLM's proposer draft with all modules of a head that has several. Other heads are drafted as before."""
    if hasattr(EagleProposer, "mtp_train"):
        return
    make, draft = EagleProposer.__init__, EagleProposer.propose

    @wraps(make)
    def made(self: Any, vllm_config: Any, device: Any, runner: Any = None) -> None:
        make(self, vllm_config, device, runner)
        self.mtp_train_runner = runner
        self.mtp_train_rows = {}

    @wraps(draft)
    def drafted(self: Any, num_speculative_tokens: int, **given: Any) -> Tensor:
        if getattr(self.model, "mtp_train_depths", 1) == 1 or num_speculative_tokens <= 1:
            out: Tensor = draft(self, num_speculative_tokens, **given)
            return out
        return propose(self, num_speculative_tokens, given)

    EagleProposer.mtp_train = True
    EagleProposer.__init__, EagleProposer.propose = made, drafted


def propose(proposer: Any, drafts: int, given: dict[str, Any]) -> Tensor:
    """Drafts [B, K] with every module in its turn."""
    proposer.num_speculative_tokens = drafts
    proposer._last_draft_probs = None
    sampling = given["sampling_metadata"]
    lag = min(proposer.model.mtp_train_depths, drafts) - 1
    rows, metadata = _first_pass(proposer, given, lag)
    chosen: list[Tensor] = []
    chances: list[Tensor] = []

    def choose(state_BD: Tensor) -> None:
        token_B, q_BV = proposer._sample_draft_tokens(state_BD, sampling)
        chosen.append(token_B)
        chances.extend([] if q_BV is None else [q_BV])

    choose(torch.stack([part.state_RD[-1] for part in rows]))
    counts = [len(part.token_R) for part in rows]
    last_B = torch.tensor(counts).cumsum(0) - 1
    state_TD = torch.cat([part.state_RD for part in rows])
    for step in range(1, lag + 1):
        draft_BS = torch.stack(chosen, dim=1).to(rows[0].token_R)
        token_T = torch.cat(
            [
                torch.cat([part.token_R, draft_S])[step:]
                for part, draft_S in zip(rows, draft_BS, strict=True)
            ]
        )
        firsts = [part.first for part in rows]
        state_TD = _run(proposer, metadata, token_T, state_TD, firsts, counts, step, step)
        choose(state_TD[last_B])
    state_BD = state_TD[last_B]
    for step in range(lag + 1, drafts):
        firsts = [part.last + step - lag for part in rows]
        token_B = chosen[-1].to(rows[0].token_R)
        state_BD = _run(proposer, metadata, token_B, state_BD, firsts, [1] * len(rows), step, lag)
        choose(state_BD)
    if chances:
        proposer._last_draft_probs = torch.stack(chances, dim=1).contiguous()
    return torch.stack(chosen, dim=1)


def _first_pass(
    proposer: Any, given: dict[str, Any], lag: int
) -> tuple[list[Rows], CommonAttentionMetadata]:
    """Run module 0 over the verified rows; of each request they and `lag` rows before, and vLLM's metadata."""
    tokens, last_B, metadata = proposer.set_inputs_first_pass(
        target_token_ids=given["target_token_ids"],
        next_token_ids=given["next_token_ids"],
        target_positions=given["target_positions"],
        target_hidden_states=given["target_hidden_states"],
        token_indices_to_sample=given["token_indices_to_sample"],
        cad=given["common_attn_metadata"],
        num_rejected_tokens_gpu=given["num_rejected_tokens_gpu"],
    )
    out_TD = _forward(
        proposer,
        metadata,
        proposer.input_ids[:tokens],
        proposer._get_positions(tokens),
        proposer.hidden_states[:tokens],
        0,
    )
    positions = proposer.positions[last_B].tolist()
    first_B = metadata.query_start_loc[:-1].tolist()
    runner, rows = proposer.mtp_train_runner, []
    running = proposer.mtp_train_rows
    kept = {request: part for request, part in running.items() if request in runner.requests}
    for number, request in enumerate(runner.input_batch.req_ids[: len(first_B)]):
        span = slice(first_B[number], int(last_B[number]) + 1)
        new = Rows(proposer.input_ids[span].clone(), out_TD[span], positions[number])
        whole = new.after(kept.get(request))
        kept[request] = whole.tail(lag)
        rows.append(whole)
    proposer.mtp_train_rows = kept
    return rows, metadata


def _run(
    proposer: Any,
    metadata: CommonAttentionMetadata,
    token_T: Tensor,
    state_TD: Tensor,
    firsts: Sequence[int],
    counts: Sequence[int],
    step: int,
    later: int,
) -> Tensor:
    """The outputs [T, D] of draft step `step` for counts[b] rows from firsts[b] on, at positions `later` after them."""
    row_T = torch.cat(
        [torch.arange(first, first + count) for first, count in zip(firsts, counts, strict=True)]
    ).to(token_T.device)
    planned = _plan(metadata, row_T, firsts, counts, proposer.block_size, proposer.max_model_len)
    position_T = (row_T + later).clamp(max=proposer.max_model_len - 1)
    return _forward(proposer, planned, token_T, position_T, state_TD, step)


def _plan(
    metadata: CommonAttentionMetadata,
    row_T: Tensor,
    firsts: Sequence[int],
    counts: Sequence[int],
    block_size: int,
    longest: int,
) -> CommonAttentionMetadata:
    """vLLM's metadata for those rows, over the same requests and block tables."""
    device = row_T.device
    count_B = torch.tensor(counts)
    start = torch.cat([torch.zeros(1, dtype=torch.int64), count_B.cumsum(0)]).to(torch.int32)
    length_B = (torch.tensor(firsts) + count_B).clamp(max=longest).to(torch.int32)
    table = metadata.block_table_tensor
    request_T = torch.arange(len(counts)).repeat_interleave(count_B).to(device)
    inside_T = row_T.clamp(max=longest - 1)
    block_T = table[request_T, inside_T // block_size].to(torch.int64)
    slot_T = block_T * block_size + inside_T % block_size
    slot_T = torch.where(row_T < longest, slot_T, PADDING_SLOT_ID)
    return CommonAttentionMetadata(
        query_start_loc=start.to(device),
        query_start_loc_cpu=start,
        seq_lens=length_B.to(device),
        seq_lens_cpu_upper_bound=length_B,
        num_reqs=len(counts),
        num_actual_tokens=len(row_T),
        max_query_len=max(counts),
        max_seq_len=int(length_B.max()),
        block_table_tensor=table[: len(counts)],
        slot_mapping=slot_T,
        causal=True,
    )


def _forward(
    proposer: Any,
    metadata: CommonAttentionMetadata,
    token_T: Tensor,
    position_T: Tensor,
    state_TD: Tensor,
    step: int,
) -> Tensor:
    """The outputs [T, D] of draft step `step` over planned rows."""
    _, by_layer = proposer.build_per_group_and_layer_attn_metadata(metadata, draft_index=step)
    slots = metadata.slot_mapping[: len(token_T)]
    with set_forward_context(
        by_layer,
        proposer.vllm_config,
        num_tokens=len(token_T),
        slot_mapping={name: slots for name in proposer._draft_attn_layer_names},
    ):
        out: Tensor = proposer.model(
            input_ids=token_T,
            positions=position_T,
            hidden_states=state_TD,
            inputs_embeds=None,
            spec_step_idx=step,
        )
    return out
