"""The contexts and the loss on a CUDA device equal the CPU's."""

from __future__ import annotations

import copy

import pytest
import torch

from mtp_train.attention.packed import RolloutContext
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
        outs = [context(0, *leaves[step : step + 3], 0.25) for step in (0, 3, 6)]
        total = sum(out.square().sum() for out in outs)
        results.append([*outs, *torch.autograd.grad(total, leaves)])
    for here, there in zip(*results, strict=True):
        torch.testing.assert_close(there.cpu(), here, atol=1e-4, rtol=1e-4)
