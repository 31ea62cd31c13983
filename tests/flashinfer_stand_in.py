"""FlashInfer's wrappers as the CPU can have them: names and arguments of version 0.7, plain masked attention inside.

They know nothing but what they are handed: index arrays, mask, window and cap of `plan`, query and pages of `run`. Each
keeps its plans in `planned`, so that tests see how often and with what it was planned.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

LOG2E = 1.4426950408889634
planned: list[dict[str, Any]] = []
made: list[object] = []


class _Paged:
    def __init__(self, scratch: Tensor, kv_layout: str) -> None:
        assert kv_layout == "NHD" and scratch.dtype == torch.uint8 and not scratch.any()
        self.plan_of: dict[str, Any] = {}
        made.append(self)

    def _keep(self, arrays: dict[str, Tensor], options: dict[str, Any]) -> None:
        for name, array in arrays.items():
            assert array.dtype == torch.int32 and array.is_contiguous(), name
            assert array.device.type == "cpu", f"{name} on a device: reading it back is a sync"
        # Copies: FlashInfer has taken what it needs when `plan` returns.
        self.plan_of = {name: array.clone() for name, array in arrays.items()} | options
        planned.append(self.plan_of)

    def _run(
        self, query: Tensor, pages: tuple[Tensor, Tensor], return_lse: bool
    ) -> Tensor | tuple[Tensor, Tensor]:
        plan = self.plan_of
        assert query.is_contiguous() and query.dtype == plan["q_data_type"]
        assert query.shape == (plan["qo_indptr"][-1], plan["num_qo_heads"], plan["head_dim"])
        for pool in pages:
            assert pool.shape[1:3] == (plan["page_size"], plan["num_kv_heads"])
            assert pool.dtype == plan["kv_data_type"] and pool.is_contiguous()
        outs, sums = [], []
        bounds = plan["qo_indptr"].tolist()
        for index in range(len(bounds) - 1):
            rows = query[bounds[index] : bounds[index + 1]]
            key, value = (self._rows(pool, index) for pool in pages)
            out, lse = self._attend(rows, key, value, self._mask(index, len(rows), len(key)))
            outs.append(out)
            sums.append(lse)
        return (torch.cat(outs), torch.cat(sums)) if return_lse else torch.cat(outs)

    def _rows(self, pool: Tensor, index: int) -> Tensor:
        first, last = self.plan_of["kv_indptr"][index : index + 2].tolist()
        pages = self.plan_of["kv_indices"][first:last].long()
        filled = (last - first - 1) * pool.shape[1] + int(self.plan_of["last_page_len"][index])
        return pool[pages].flatten(0, 1)[:filled]

    def _mask(self, index: int, rows: int, cached: int) -> Tensor:
        plan = self.plan_of
        row, column = torch.arange(rows).unsqueeze(1), torch.arange(cached)
        if plan["custom_mask"] is not None:
            bounds = plan["qo_indptr"].tolist()
            before = sum(
                (bounds[other + 1] - bounds[other]) * self._length(other) for other in range(index)
            )
            seen = plan["custom_mask"][before : before + rows * cached].view(rows, cached)
        elif plan["causal"]:
            seen = column <= row + cached - rows
        else:
            seen = torch.ones(rows, cached, dtype=torch.bool)
        if plan["window_left"] >= 0:
            seen = seen & (column + rows + plan["window_left"] >= cached + row)
        return seen

    def _length(self, index: int) -> int:
        first, last = self.plan_of["kv_indptr"][index : index + 2].tolist()
        return (last - first - 1) * self.plan_of["page_size"] + int(
            self.plan_of["last_page_len"][index]
        )

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, seen: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Softmax attention, and its log-sum-exp in base 2."""
        shared = self.plan_of["num_qo_heads"] // self.plan_of["num_kv_heads"]
        key, value = (rows.repeat_interleave(shared, 1) for rows in (key, value))
        score = torch.einsum("thd,lhd->htl", query.double(), key.double())
        score = score * self.plan_of["sm_scale"]
        cap = self.plan_of["logits_soft_cap"]
        if cap is not None and cap > 0:
            score = cap * torch.tanh(score / cap)
        score = score.masked_fill(~seen, float("-inf"))
        out = torch.einsum("htl,lhw->thw", score.softmax(-1), value.double())
        return out.to(query.dtype), (score.logsumexp(-1) * LOG2E).T.float()


class BatchPrefillWithPagedKVCacheWrapper(_Paged):
    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        super().__init__(float_workspace_buffer, kv_layout)

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
    ) -> None:
        assert sm_scale is not None
        arrays = {
            "qo_indptr": qo_indptr,
            "kv_indptr": paged_kv_indptr,
            "kv_indices": paged_kv_indices,
            "last_page_len": paged_kv_last_page_len,
        }
        self._keep(
            arrays,
            {
                "kind": "prefill",
                "num_qo_heads": num_qo_heads,
                "num_kv_heads": num_kv_heads,
                "head_dim": head_dim_qk,
                "page_size": page_size,
                "custom_mask": custom_mask,
                "causal": causal,
                "sm_scale": sm_scale,
                "window_left": window_left,
                "logits_soft_cap": logits_soft_cap,
                "q_data_type": q_data_type,
                "kv_data_type": kv_data_type or q_data_type,
            },
        )
        if custom_mask is not None:
            lengths = [self._length(index) for index in range(len(qo_indptr) - 1)]
            rows = np.diff(qo_indptr.numpy())
            assert custom_mask.dtype == torch.bool
            assert custom_mask.shape == (int((rows * np.asarray(lengths)).sum()),)

    def run(
        self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, return_lse: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        return self._run(q, paged_kv_cache, return_lse)


class BatchDecodeWithPagedKVCacheWrapper(_Paged):
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout)
        self.use_tensor_cores = use_tensor_cores

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
        sm_scale: float | None = None,
    ) -> None:
        assert sm_scale is not None
        # The kernel without tensor cores is compiled for few numbers of heads per key.
        assert self.use_tensor_cores or num_qo_heads // num_kv_heads in (1, 2, 3, 4, 6, 8, 16)
        arrays = {"kv_indptr": indptr, "kv_indices": indices, "last_page_len": last_page_len}
        self._keep(
            arrays,
            {
                "kind": "decode",
                "qo_indptr": torch.arange(len(indptr), dtype=torch.int32),
                "num_qo_heads": num_qo_heads,
                "num_kv_heads": num_kv_heads,
                "head_dim": head_dim,
                "page_size": page_size,
                "custom_mask": None,
                "causal": False,
                "sm_scale": sm_scale,
                "window_left": window_left,
                "logits_soft_cap": logits_soft_cap,
                "q_data_type": q_data_type,
                "kv_data_type": kv_data_type or q_data_type,
            },
        )

    def run(
        self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, return_lse: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        return self._run(q, paged_kv_cache, return_lse)
