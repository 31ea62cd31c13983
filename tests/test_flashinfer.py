"""What FlashInfer is handed is right: stand-ins that compute from exactly that equal attention row by row."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace

import flashinfer_stand_in as stand_in
import pytest
import torch
from paged_cases import Case, Heads, Item, make_case, random_tree, rules
from test_paged_trees import BATCHES

from mtp_train.attention import backends, flashinfer_backend
from mtp_train.attention.backends import Backend, backend_for, flashinfer_on
from mtp_train.attention.flashinfer_backend import FlashInferContext, Shape, Workspace
from mtp_train.attention.interface import AttentionRule
from mtp_train.attention.paged import PagedContext
from mtp_train.core.errors import UserError

CPU = torch.device("cpu")
PLAIN = AttentionRule(0.4)
DECODE = [Item(10, 1), Item(2, 1), Item(0, 1), Item(31, 1)]


@pytest.fixture
def workspace(monkeypatch: pytest.MonkeyPatch) -> Iterator[Workspace]:
    """Kernels for the tests' widths, in float64."""
    monkeypatch.setattr(flashinfer_backend, "DTYPES", (torch.float64, torch.bfloat16))
    monkeypatch.setattr(flashinfer_backend, "WIDTHS", (8, 16, 64))
    stand_in.planned.clear()
    stand_in.made.clear()
    yield Workspace(CPU, stand_in, size=64)
    stand_in.planned.clear()
    stand_in.made.clear()


@pytest.fixture
def backend(workspace: Workspace) -> Backend:
    return flashinfer_on(workspace)


@pytest.mark.parametrize("rule", rules(4))
@pytest.mark.parametrize("batch", [*BATCHES, "one row each"])
def test_every_batch_under_every_rule(batch: str, rule: str, backend: Backend) -> None:
    case = make_case(BATCHES.get(batch, DECODE))
    chosen = rules(4)[rule]
    out = case.run(backend.of, chosen)
    assert backend.refused == set() and len(stand_in.planned) == 1
    torch.testing.assert_close(out, case.expected(chosen), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(
        out, PagedContext(case.cache, case.plan)(0, *_inputs(case), chosen), atol=1e-6, rtol=1e-6
    )


@pytest.mark.parametrize("heads", [Heads(3, 3), Heads(6, 1), Heads(5, 1, 16, 16), Heads(9, 3)])
def test_one_row_per_sequence_decodes_and_others_do_not(heads: Heads, backend: Backend) -> None:
    for items, kind in (
        (DECODE, "decode"),
        ([Item(10, 1), Item(3, 2)], "prefill"),
        ([random_tree(5, 4, 1, seed=1), random_tree(9, 3, 1, seed=2)], "prefill"),
    ):
        case = make_case(items, heads)
        out = case.run(backend.of, PLAIN)
        assert stand_in.planned[-1]["kind"] == kind
        torch.testing.assert_close(out, case.expected(PLAIN), atol=1e-6, rtol=1e-6)


def test_tensor_cores_decode_where_many_heads_share_a_key(backend: Backend) -> None:
    chosen = []
    for shared in (1, 3, 4, 5, 16):
        make_case(DECODE, Heads(shared, 1)).run(backend.of, PLAIN)
        wrapper = stand_in.made[-1]
        assert isinstance(wrapper, stand_in.BatchDecodeWithPagedKVCacheWrapper)
        chosen.append(wrapper.use_tensor_cores)
    assert chosen == [False, False, True, True, True]


def test_a_batch_is_planned_once_per_kind_of_layer(backend: Backend) -> None:
    items = [Item(10, 3), random_tree(4, 5, 5, seed=1)]
    case = make_case(items, layers=4)
    context = backend.of(case.cache, case.plan)
    assert backend.of(case.cache, case.plan) is context
    for layer, window in ((0, None), (1, 3), (2, None), (3, 3), (0, 500)):
        rule = replace(PLAIN, window=window)
        torch.testing.assert_close(
            case.call(context, rule, layer), case.expected(rule), atol=1e-6, rtol=1e-6
        )
    assert len(stand_in.planned) == 2, "a window that holds everything is none"
    sinks = replace(PLAIN, sinks=torch.ones(4))
    case.call(context, sinks, 0)
    assert len(stand_in.planned) == 2, "sinks need no plan of their own"
    head = make_case(items, Heads(6, 2, 16, 16))
    head.call(FlashInferContext(head.cache, head.plan, _workspace_of(context)), PLAIN)
    case.call(context, replace(PLAIN, scaling=0.1))
    assert len(stand_in.planned) == 4


def test_the_pages_are_the_pools_themselves(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make_case(DECODE)
    seen = []
    run = stand_in.BatchDecodeWithPagedKVCacheWrapper.run

    def spy(self: object, q: object, pages: tuple[torch.Tensor, torch.Tensor]) -> object:
        seen.extend(pages)
        return run(self, q, pages)  # type: ignore[arg-type]

    monkeypatch.setattr(stand_in.BatchDecodeWithPagedKVCacheWrapper, "run", spy)
    case.run(backend.of, PLAIN)
    pools = case.cache._pools[0]
    assert pools is not None
    assert [page.data_ptr() for page in seen] == [pool.data_ptr() for pool in pools]


def test_what_has_no_kernel_runs_on_torch_and_says_why(backend: Backend) -> None:
    for heads, dtype, reason in (
        (Heads(4, 2, 8, 8), torch.float32, "bfloat16 or float16, not in torch.float32"),
        (Heads(4, 2, 16, 8), torch.float64, "keys of width 16 and values of 8"),
        (Heads(4, 2, 12, 12), torch.float64, "heads of width 12 have no kernel"),
    ):
        case = make_case(BATCHES["ragged trees"], heads, dtype)
        out = case.run(backend.of, PLAIN)
        assert [reason in refused for refused in backend.refused] == [True]
        torch.testing.assert_close(out.double(), case.expected(PLAIN), atol=1e-4, rtol=1e-4)
        backend.refused.clear()
    assert stand_in.made == [], "no kernel was asked for"


def test_one_kind_of_layer_may_have_kernels_and_another_none(backend: Backend) -> None:
    """Both write the same cache: a target of the one kind, a head of the other."""
    items = BATCHES["trees, a prompt's part, and single rows"]
    for heads in (Heads(), Heads(value_width=5)):
        case = make_case(items, heads)
        torch.testing.assert_close(
            case.run(backend.of, PLAIN), case.expected(PLAIN), atol=1e-6, rtol=1e-6
        )
    assert len(stand_in.planned) == 1 and len(backend.refused) == 1


def test_batches_that_are_done_leave_their_wrappers_to_the_next(workspace: Workspace) -> None:
    gc.disable()  # a context must go without it
    try:
        for _ in range(5):
            case = make_case(DECODE)
            case.run(flashinfer_on(workspace).of, PLAIN)
            del case
    finally:
        gc.enable()
    assert len(stand_in.made) == 1 and len(stand_in.planned) == 5


def test_batches_at_the_same_time_have_wrappers_of_their_own(workspace: Workspace) -> None:
    """Planned one after the other, then run in turns, as target and head do."""
    make_case(BATCHES["no tree"]).run(flashinfer_on(workspace).of, PLAIN)
    gc.collect()  # its wrapper is free now, for one of the two
    stand_in.planned.clear()
    cases = [make_case(BATCHES["ragged trees"], seed=1), make_case(BATCHES["no tree"], seed=2)]
    contexts = [FlashInferContext(case.cache, case.plan, workspace) for case in cases]
    for _ in range(2):
        for case, context in zip(cases, contexts, strict=True):
            torch.testing.assert_close(
                case.call(context, PLAIN), case.expected(PLAIN), atol=1e-6, rtol=1e-6
            )
    assert len(stand_in.made) == 2 and len(stand_in.planned) == 2


def test_a_wrapper_whose_plan_is_still_on_its_way_is_left_alone(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its page-locked memory has not been copied to the device yet."""
    make_case(DECODE).run(flashinfer_on(workspace).of, PLAIN)
    gc.collect()
    monkeypatch.setattr(flashinfer_backend._Wrapper, "idle", False)
    make_case(DECODE).run(flashinfer_on(workspace).of, PLAIN)
    assert len(stand_in.made) == 2
    gc.collect()
    monkeypatch.setattr(flashinfer_backend._Wrapper, "idle", True)
    make_case(DECODE).run(flashinfer_on(workspace).of, PLAIN)
    assert len(stand_in.made) == 2


def test_deepseeks_expanded_keys_and_llamas_heads() -> None:
    """The production widths: 192 against 128 is refused, 64 and 128 are not."""

    def refusal(key: int, value: int, dtype: torch.dtype = torch.bfloat16) -> str:
        return Shape(32, 8, key, value, dtype, 0.1, None, None).refusal

    assert "other strides" in refusal(192, 128)
    assert refusal(64, 64) == refusal(128, 128) == refusal(256, 256, torch.float16) == ""
    assert "no kernel" in refusal(80, 80)
    assert "torch.float32" in refusal(128, 128, torch.float32)


def test_the_backend_follows_the_device_and_the_wish(monkeypatch: pytest.MonkeyPatch) -> None:
    for wanted in ("auto", "torch"):
        backend = backend_for(CPU, wanted)
        assert backend.name == "torch" and backend.of == PagedContext.of
    with pytest.raises(UserError, match=r"needs a CUDA device; .* on cpu; set .*attention=auto"):
        backend_for(CPU, "flashinfer")
    with pytest.raises(UserError, match="auto, torch, flashinfer"):
        backend_for(CPU, "flash")
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(backends, "find_spec", lambda name: None)
    assert backend_for(gpu, "auto").name == "torch"
    with pytest.raises(UserError, match="not installed; pip install"):
        backend_for(gpu, "flashinfer")
    monkeypatch.setattr(backends, "find_spec", lambda name: object())
    monkeypatch.setattr(backends, "_workspace", lambda device: Workspace(CPU, stand_in, size=64))
    assert [backend_for(gpu, wanted).name for wanted in backends.CHOICES] == [
        "flashinfer",
        "torch",
        "flashinfer",
    ]


def _inputs(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    key, value = (
        torch.cat([rows[item.cached :] for item, rows in zip(case.items, every, strict=True)])
        for every in (case.keys, case.values)
    )
    return case.query_THd, key, value


def _workspace_of(context: object) -> Workspace:
    assert isinstance(context, FlashInferContext)
    return context.workspace
