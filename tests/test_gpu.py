"""The contexts and the loss on a CUDA device equal the CPU's; FlashInfer's attention equals the torch backend's."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from paged_cases import Case, Heads, Item, make_case, random_tree, rules
from toys import make_target

from mtp_train.attention.backends import Backend, backend_for
from mtp_train.attention.interface import AttentionRule
from mtp_train.attention.packed import PackedContext, RolloutContext
from mtp_train.engine.chain import ChainProposer
from mtp_train.engine.engine import Engine, EngineConfig
from mtp_train.engine.sequences import Request
from mtp_train.heads.mtp import MtpConfig, build
from mtp_train.losses.chunked import ON_DISTRIBUTION, ON_LABELS, distill
from mtp_train.models.target import Target

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
needs_flashinfer = pytest.mark.skipif(find_spec("flashinfer") is None, reason="needs flashinfer")
GPU = torch.device("cuda", 0)
BACKENDS = ("torch", pytest.param("flashinfer", marks=needs_flashinfer))
# Few kinds, since the first use of each compiles a kernel; rows of at most 64 take FA2, which knows masks, as trees do.
BATCHES = {
    "a row each": [Item(37, 1), Item(2, 1), Item(0, 1), Item(200, 1), Item(64, 1)],
    "verified rows": [Item(37, 4), Item(2, 4), Item(200, 4)],
    "parts of prompts and single rows": [Item(0, 50), Item(33, 17), Item(90, 1), Item(5, 1)],
    "trees": [random_tree(n * 31, 8, 8, seed=n) for n in range(4)],
    "levels of trees beside the rest": [
        random_tree(40, 12, 4, seed=5),
        random_tree(3, 9, 1, seed=6),
        Item(70, 4),
        Item(0, 20),
    ],
}
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3}
KINDS = [  # 64: few heads share a key; 128: many do, and decode on tensor cores
    (Heads(6, 2, 64, 64), torch.bfloat16, name)
    for name in ("plain", "softcap", "sinks", "plain, window 9", "sinks, window 9")
] + [(Heads(8, 1, 128, 128), torch.float16, name) for name in ("plain", "sinks")]


@contextmanager
def no_sync() -> Iterator[torch.cuda.Event]:
    """An error for calls that wait for the device, which is busy meanwhile; the event comes when it no longer is."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(2 * 10**9)
        busy = torch.cuda.Event()
        busy.record()
        yield busy
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()


def on_gpu(name: str, heads: Heads) -> AttentionRule:
    rule = rules(heads.heads)[name]
    return rule if rule.sinks is None else replace(rule, sinks=rule.sinks.to(GPU))


def assert_close(case: Case, out: torch.Tensor, rule: AttentionRule) -> None:
    bound = TOLERANCE[out.dtype]
    torch.testing.assert_close(out.double(), case.expected(rule), atol=bound, rtol=bound)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("heads", "dtype", "rule"), KINDS)
@pytest.mark.parametrize("name", BACKENDS)
def test_paged_attention_row_by_row(
    name: str, heads: Heads, dtype: torch.dtype, rule: str, batch: str
) -> None:
    backend = backend_for(GPU, name)
    backend.refused.clear()
    case = make_case(BATCHES[batch], heads, dtype, "cuda", page=16)
    chosen = on_gpu(rule, heads)
    assert_close(case, case.run(backend.of, chosen), chosen)
    assert backend.refused == set()


@needs_flashinfer
def test_flashinfer_takes_hoppers_own_kernel_for_long_prompts_where_there_is_one() -> None:
    heads = Heads(8, 2, 128, 128)
    case = make_case([Item(0, 300), Item(500, 100), Item(40, 1)], heads, torch.bfloat16, "cuda")
    for name in ("plain", "sinks"):
        rule = on_gpu(name, heads)
        assert_close(case, case.run(backend_for(GPU, "flashinfer").of, rule), rule)


@needs_flashinfer
def test_flashinfer_leaves_expanded_latent_attention_to_torch() -> None:
    backend = backend_for(GPU, "flashinfer")
    heads = Heads(4, 4, 192, 128)
    case = make_case(BATCHES["trees"], heads, torch.bfloat16, "cuda", page=16)
    rule = on_gpu("plain", heads)
    assert_close(case, case.run(backend.of, rule), rule)
    assert any("other strides" in reason for reason in backend.refused)


@needs_flashinfer
@pytest.mark.parametrize("batch", ["a row each", "verified rows"])
def test_flashinfer_plans_and_attends_without_waiting(batch: str) -> None:
    """The device is busy with what came before all the while: nothing is read back from it."""
    heads, backend = Heads(6, 2, 64, 64), backend_for(GPU, "flashinfer")
    case = make_case(BATCHES[batch], heads, torch.bfloat16, "cuda", layers=2, page=16)
    for name in ("plain", "sinks"):  # compiled and warm
        case.run(backend.of, on_gpu(name, heads))
    case.plan.contexts.clear()
    plain, sinks = on_gpu("plain", heads), on_gpu("sinks", heads)
    with no_sync() as busy:
        context = backend.of(case.cache, case.plan)
        outs = [case.call(context, plain, layer=0), case.call(context, sinks, layer=1)]
        assert not busy.query(), "waited for the device"
    for out, rule in zip(outs, (plain, sinks), strict=True):
        assert_close(case, out, rule)


@needs_flashinfer
def test_flashinfers_plans_far_ahead_of_the_device_leave_each_other_alone() -> None:
    heads, backend = Heads(6, 2, 64, 64), backend_for(GPU, "flashinfer")
    rule = on_gpu("plain", heads)
    cases = [
        make_case([Item(50 * n + m, 2) for m in range(3)], heads, torch.bfloat16, "cuda", seed=n)
        for n in range(6)
    ]
    _run_all(cases, backend, rule)  # a wrapper for each: all contexts are alive
    for case in cases:
        case.plan.contexts.clear()
    with no_sync():
        outs = []
        for case in cases:
            outs.append(case.run(backend.of, rule))
            case.plan.contexts.clear()  # its wrapper is free for the next, its plan not on the device yet
    for case, out in zip(cases, outs, strict=True):
        assert_close(case, out, rule)


def _run_all(cases: list[Case], backend: Backend, rule: AttentionRule) -> None:
    for case in cases:
        case.run(backend.of, rule)


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("name", BACKENDS)
def test_the_engines_greedy_tokens_are_the_targets(name: str, drafts: int) -> None:
    """In float16 under either backend; a token may differ from float32's only where the two are as good as equal."""
    exact = make_target(
        hidden_size=128, num_attention_heads=2, num_key_value_heads=1, initializer_range=0.1
    )
    half = Target(copy.deepcopy(exact.model).half().cuda())
    requests = [
        Request(str(index), tuple((7 * index + n) % 61 for n in range(3 + 7 * index)), 20)
        for index in range(5)
    ]
    proposer = (
        ChainProposer(half, build(half, MtpConfig(init="random")), drafts) if drafts else None
    )
    config = EngineConfig(max_batch=3, cache_rows=512, page_size=4, attention=name)
    done = Engine(half, proposer, config).generate(requests)
    assert len({completion.tokens for completion in done}) == len(requests)
    for completion in done:
        tokens = torch.tensor([*completion.prompt, *completion.tokens])
        begin, rows = len(completion.prompt), len(tokens)
        states = exact.forward(tokens, torch.arange(rows), PackedContext([0, rows]))
        logits_TV = exact.logits(states)[begin - 1 : -1]
        chosen_T = logits_TV.gather(1, tokens[begin:, None]).squeeze(1)
        assert (logits_TV.amax(1) - chosen_T).max() < 0.01  # logits spread by 1.1


def test_greedy_speculation_on_the_gpu_equals_plain_decoding_on_the_cpu(toy_target: Target) -> None:
    prompts = [tuple(range(1, 3 + 7 * index)) for index in range(5)]
    requests = [Request(str(index), prompt, 20) for index, prompt in enumerate(prompts)]
    config = EngineConfig(max_batch=3, cache_rows=512, page_size=4)
    plain = Engine(toy_target, None, config).generate(requests)
    on_gpu = Target(copy.deepcopy(toy_target.model).cuda())
    head = build(on_gpu, MtpConfig(init="random"))
    done = Engine(on_gpu, ChainProposer(on_gpu, head, 3), config).generate(requests)
    assert [c.tokens for c in done] == [c.tokens for c in plain]


@pytest.mark.parametrize("own", [False, True], ids=["shared", "own_matrix"])
def test_the_loss_on_the_gpu_equals_the_cpus(own: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    student = torch.randn(2, 9, 16, generator=generator)
    teacher = torch.randn(9, 16, generator=generator)
    head = torch.randn(50, 16, generator=generator)
    matrix = torch.randn(50, 16, generator=generator)
    label = torch.randint(50, (9,), generator=generator)
    weights = dict.fromkeys((*ON_DISTRIBUTION, *ON_LABELS), 0.5)
    found = []
    for device in ("cpu", "cuda"):
        states = student.to(device).requires_grad_()
        trained = matrix.to(device).requires_grad_() if own else None
        result = distill(
            states,
            teacher.to(device),
            head.to(device),
            weights,
            label_N=label.to(device),
            student_head=trained,
            measure=True,
            chunk=4,
        )
        result.loss.backward()
        gradients = [tensor.grad for tensor in (states, trained) if tensor is not None]
        tensors = [*result.terms.values(), result.alpha_SN, result.loss.detach(), *gradients]
        found.append([tensor.cpu() for tensor in tensors])
    torch.testing.assert_close(found[1], found[0], atol=1e-4, rtol=1e-4)


def test_a_rollouts_attention_on_the_gpu_equals_the_cpus() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(300, heads, 16, generator=generator) for heads in (4, 2, 2) * 3]
    results = []
    for device in ("cpu", "cuda"):
        leaves = [tensor.to(device).requires_grad_() for tensor in rows]
        context = RolloutContext([0, 7, 300])
        outs = []
        for step in (0, 3, 6):
            outs.append(context(0, *leaves[step : step + 3], AttentionRule(0.25)))
            context = context.then()
        total = sum(out.square().sum() for out in outs)
        results.append([*outs, *torch.autograd.grad(total, leaves)])
    for here, there in zip(*results, strict=True):
        torch.testing.assert_close(there.cpu(), here, atol=1e-4, rtol=1e-4)
