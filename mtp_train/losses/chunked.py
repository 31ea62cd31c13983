"""Any sum of the vocabulary's loss terms, value and gradient together, without logits for the batch.

A chunk of goals at a time is projected: once by the target's states, for all draft steps, once by each step's. A block
of few goals at a time, which stays in the cache, is then compared: one set of logits serves every term, and only the
passes over V that the terms need are made. Memory is one chunk of logits per step, whatever the number of goals. Twins
of `reference`; knows no head and no mean over goals.

With t the target's logits, z the head's, p and q their softmax and d = z - t, the gradients by z are

    kl, soft_ce  q - p                               reverse_kl  q (d - sum q d)
    tv           q (sum m q - m), m = [q < p]        nla         tv's / alpha
    lk           lambda kl's + (1 - lambda) tv's     hard_ce     q - [label]

so every sum of them is a q - b p - c m q + r q d - h [label] with one number per goal for each letter. A target that
caps its logits, c tanh(x / c), caps t, and z where the head shares its lm_head: the gradient by x is that by z times
1 - (z / c)^2. A low rank that a head adds to its logits, r M^T, has its own two products beside those of the output
matrix: with G the gradient by z, that by r is G M and that by M is G^T r.

Shapes: N goals, S draft steps, C goals of a chunk, B of a block, D the target's width, E the head's width (D unless its
output matrix is its own), V vocabulary (or the part of it that the matrices hold), R rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CHUNK = 256  # goals of a matrix product; more gain nothing on the machines tried and take memory
BLOCK_SCORES = 2**19  # logits of a block per thread: 2 MB in float32
ON_DISTRIBUTION = ("kl", "reverse_kl", "soft_ce", "tv", "nla", "lk")
ON_LABELS = ("hard_ce",)


@dataclass(frozen=True)
class LossValues:
    """The weighted loss and what it is made of, one value per draft step and goal."""

    loss: Tensor  # scalar, sum over steps, goals and terms; the only one that carries gradients
    terms: dict[str, Tensor]  # [S, N] of each term with a weight, unweighted; and kl where measured
    alpha_SN: Tensor  # sum_x min(p, q), chance of acceptance under sampling; zeros unless measured
    agree_SN: Tensor  # bool: head and target choose the same token; False unless measured
    outside: Tensor  # scalar: goals whose label is not in the vocabulary and has no hard_ce


def distill(
    student_SNE: Tensor,
    teacher_ND: Tensor,
    head_VD: Tensor,
    weights: Mapping[str, float],
    *,
    weight_SN: Tensor | None = None,
    label_N: Tensor | None = None,
    student_head: Tensor | None = None,
    bias: tuple[Tensor, Tensor] | None = None,
    lk_eta: float = 3.0,
    softcap: float | None = None,
    measure: bool = False,
    report: Sequence[str] = (),
    chunk: int = CHUNK,
) -> LossValues:
    """sum over steps and goals of weight_SN * sum_k weights[k] * term_k, with gradients to all that is the student's.

    The weights of goals go in, rather than a mean coming out, because the gradient of a trained output matrix sums over
    goals: it could not be weighted afterwards without a second projection.

    Args:
        student_SNE: the head's output states; gradients flow to them.
        teacher_ND: the target's states at the goals (post-norm).
        head_VD: the frozen lm_head, or its rows of a draft vocabulary: p is then renormalised over them. Matmuls run
            in its dtype, everything else at least in float32.
        weights: by name, out of ON_DISTRIBUTION and ON_LABELS; no entry or 0 is off.
        weight_SN: of each step and goal; ones by default.
        label_N: int64, rows of the matrix, -1 where the label is none of them (see `label_rows`); for hard_ce.
        student_head: the head's own output matrix over the same rows, [V, E], or one per step, [S, V, E]; gradients
            flow to it, summed in float32. By default the frozen lm_head.
        bias: (read [S, N, R], matrix [V, R]), whose product is added to the student's logits; gradients flow to both.
        softcap: of the target's logits; a head's own output matrix has none.
        measure: compute alpha and kl too.
        report: terms whose values are wanted without a weight.
    """
    chosen = {name: float(value) for name, value in weights.items() if value}
    unweighted = tuple(name for name in report if name not in chosen)
    plan = _Plan(chosen, lk_eta, softcap, measure, unweighted)
    assert plan.weights.keys() <= {*ON_DISTRIBUTION, *ON_LABELS}, plan.weights
    assert label_N is not None or "hard_ce" not in plan.weights, "hard_ce needs labels"
    capped = softcap is not None and student_head is None
    assert bias is None or not capped, "a low rank is added to logits that have no cap"
    if label_N is None:
        label_N = torch.zeros(len(teacher_ND), dtype=torch.int64, device=teacher_ND.device)
    if weight_SN is None:
        weight_SN = torch.ones(student_SNE.shape[:2], device=student_SNE.device)
    students = (student_SNE, student_head, *(bias or (None, None)))
    if not torch.is_grad_enabled():  # `needs_input_grad` asks the inputs alone, whatever the mode
        students = tuple(None if one is None else one.detach() for one in students)
    loss, values, alpha, agree = _Distill.apply(
        *students,
        teacher_ND,
        head_VD,
        weight_SN,
        label_N,
        plan,
        chunk,
    )
    terms = dict(zip(plan.reported, values, strict=True))
    return LossValues(loss, terms, alpha, agree, (label_N < 0).sum())


def label_rows(label_N: Tensor, vocabulary_U: Tensor) -> Tensor:
    """Where each label stands in a sorted part of the vocabulary [N]; -1 where it is not in it."""
    row_N = torch.searchsorted(vocabulary_U, label_N).clamp(max=len(vocabulary_U) - 1)
    return torch.where(vocabulary_U[row_N] == label_N, row_N, -1)


@dataclass(frozen=True)
class _Plan:
    """Which terms, and so which passes over V."""

    weights: dict[str, float]
    eta: float
    softcap: float | None
    measure: bool
    unweighted: tuple[str, ...] = ()  # terms whose values are wanted all the same

    @property
    def reported(self) -> tuple[str, ...]:
        extra = ("kl",) if self.measure else ()
        return tuple(dict.fromkeys((*self.weights, *self.unweighted, *extra)))

    def any(self, *names: str) -> bool:
        return any(name in self.weights or name in self.unweighted for name in names)

    @property
    def target(self) -> bool:
        """Is p needed?"""
        return self.measure or self.any(*ON_DISTRIBUTION)

    @property
    def divergence(self) -> bool:
        return self.measure or self.any("kl", "lk")

    @property
    def cross(self) -> bool:
        return self.divergence or self.any("soft_ce")

    @property
    def overlap(self) -> bool:
        return self.measure or self.any("tv", "nla", "lk")

    @property
    def plain(self) -> bool:
        """Is the gradient a multiple of q - p?"""
        others = ("reverse_kl", "tv", "nla", "lk", "hard_ce")
        return not any(name in self.weights for name in others)

    @property
    def pull(self) -> float:
        """The weight of q - p."""
        return self.of("kl") + self.of("soft_ce")

    @property
    def factor(self) -> float:
        """What is left to multiply gradients by once they are states'."""
        return self.pull if self.plain else 1.0

    def of(self, name: str) -> float:
        return self.weights.get(name, 0.0)


class _Distill(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        student: Tensor,
        student_head: Tensor | None,
        read: Tensor | None,
        low_rank: Tensor | None,
        teacher: Tensor,
        head: Tensor,
        weight: Tensor,
        label: Tensor,
        plan: _Plan,
        chunk: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        steps, goals, _ = student.shape
        work = _Chunk(min(chunk, max(goals, 1)), steps, head, student_head, low_rank, plan)
        block = _Block(min(chunk, _cached_rows(head)), head, student_head is None, plan)
        values = torch.zeros(len(plan.reported), steps, goals, dtype=block.wide, device=head.device)
        alpha = torch.zeros(steps, goals, dtype=block.wide, device=head.device)
        agree = torch.zeros(steps, goals, dtype=torch.bool, device=head.device)
        wanted = ctx.needs_input_grad[:4]
        gradients = _Gradients(
            wanted, student, student_head, read, low_rank, block.wide, head.dtype
        )
        differentiate = bool(plan.weights) and any(wanted)
        for start in range(0, goals if plan.reported else 0, chunk):
            part = slice(start, min(start + chunk, goals))
            work.project(teacher[part], student[:, part], None if read is None else read[:, part])
            for rows in block.parts(part.stop - start):
                at = slice(start + rows.start, start + rows.stop)
                taught = None if work.taught is None else work.taught[rows]
                block.teach(taught, label[at])
                for step in range(steps):
                    logits = work.projected[step][rows]
                    found, alpha[step, at], agree[step, at] = block.compare(logits)
                    for index, name in enumerate(plan.reported):
                        values[index, step, at] = found[name]
                    if differentiate:
                        block.differentiate(logits)
            for step in range(steps if differentiate else 0):
                scale = plan.factor * weight[step, part].unsqueeze(-1)
                gradients.add(work, step, part, scale)
        ctx.save_for_backward(*gradients.all)
        ctx.mark_non_differentiable(values, alpha, agree)
        total = torch.zeros((), dtype=block.wide, device=head.device)
        for index, name in enumerate(plan.weights):
            total = total + plan.weights[name] * (values[index] * weight).sum()
        return total, values, alpha, agree

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        gradients = [
            None if saved is None else saved * upstream[0].to(saved.dtype)
            for saved in ctx.saved_tensors
        ]
        return (*gradients, *(None,) * 6)


class _Gradients:
    """Gradients of all that is the student's, None where not wanted; filled a chunk at a time."""

    def __init__(
        self,
        wanted: Sequence[bool],
        student: Tensor,
        student_head: Tensor | None,
        read: Tensor | None,
        low_rank: Tensor | None,
        wide: torch.dtype,
        matmul: torch.dtype,
    ) -> None:
        to_states, to_head, to_read, to_rank = wanted
        self.student, self.read = student, read
        self.states = torch.zeros_like(student) if to_states else None
        self.head = _MatrixGradient(student_head, wide, matmul) if to_head else None
        self.reads = torch.zeros_like(read) if to_read and read is not None else None
        self.rank = _MatrixGradient(low_rank, wide, matmul) if to_rank else None

    def add(self, work: _Chunk, step: int, part: slice, scale_C1: Tensor) -> None:
        """Take in a chunk's gradient by the logits of one step."""
        logits_CV = work.projected[step]
        if self.states is not None:
            self.states[step, part] = scale_C1 * work.to_states(step)
        if self.head is not None:
            self.head.add(logits_CV, scale_C1 * self.student[step, part], step)
        if self.reads is not None:
            self.reads[step, part] = scale_C1 * work.to_read(step)
        if self.rank is not None and self.read is not None:
            self.rank.add(logits_CV, scale_C1 * self.read[step, part], step)

    @property
    def all(self) -> tuple[Tensor | None, ...]:
        """By states, output matrix, what the low rank reads, and its matrix."""
        head, rank = (None if one is None else one.total for one in (self.head, self.rank))
        return self.states, head, self.reads, rank


class _MatrixGradient:
    """The gradient of a matrix of the student's, summed over chunks and steps."""

    def __init__(self, matrix: Tensor | None, wide: torch.dtype, matmul: torch.dtype) -> None:
        assert matrix is not None
        self.total = torch.zeros_like(matrix, dtype=wide)
        self.part = torch.empty(
            matrix.shape[-2:], dtype=matmul, device=matrix.device
        )  # one chunk's

    def add(self, gradient_CV: Tensor, state_CE: Tensor, step: int) -> None:
        torch.mm(gradient_CV.T, state_CE.to(self.part.dtype), out=self.part)
        (self.total if self.total.ndim == 2 else self.total[step]).add_(self.part)


class _Chunk:
    """One chunk's matrix products, in the matmuls' dtype; `projected` holds logits, then their gradients.

    Allocated once: fresh [C, V] tensors cost more in page faults than the arithmetic on them does.
    """

    def __init__(
        self,
        chunk: int,
        steps: int,
        head_VD: Tensor,
        student_head: Tensor | None,
        low_rank_VR: Tensor | None,
        plan: _Plan,
    ) -> None:
        self.head, self.plan = head_VD, plan
        self.own, self.low_rank = (
            None if matrix is None else matrix.detach().to(head_VD.dtype)
            for matrix in (student_head, low_rank_VR)
        )
        matrices = steps + 1 if plan.target else steps
        self.buffers = [head_VD.new_empty(chunk, len(head_VD)) for _ in range(matrices)]

    def project(self, teacher_CD: Tensor, student_SCE: Tensor, read_SCR: Tensor | None) -> None:
        """The logits of a chunk of goals: the target's, and of every step the student's.

        Where they are held against the target's and the output matrix is shared, the student's are those of the
        difference of the states: rounding is relative to the difference, which the gradients are made of, and not to
        logits that are a hundred times as large.
        """
        self.projected = [buffer[: len(teacher_CD)] for buffer in self.buffers]
        self.taught = self.projected.pop() if self.plan.target else None
        if self.taught is not None:
            torch.mm(teacher_CD.to(self.head.dtype), self.head.T, out=self.taught)
            if self.own is None:
                student_SCE = student_SCE - teacher_CD.to(student_SCE.dtype)
        for step, state_CE in enumerate(student_SCE):
            matrix_VE = self._matrix(step)
            torch.mm(state_CE.to(matrix_VE.dtype), matrix_VE.T, out=self.projected[step])
            if read_SCR is not None and self.low_rank is not None:
                read_CR = read_SCR[step].to(self.low_rank.dtype)
                self.projected[step].addmm_(read_CR, self.low_rank.T)

    def to_states(self, step: int) -> Tensor:
        """The gradient by the logits projected back to the student's states [C, E]."""
        return self.projected[step] @ self._matrix(step)

    def to_read(self, step: int) -> Tensor:
        """The gradient by the logits projected back to what the low rank reads [C, R]."""
        assert self.low_rank is not None
        return self.projected[step] @ self.low_rank

    def _matrix(self, step: int) -> Tensor:
        if self.own is None:
            return self.head
        return self.own if self.own.ndim == 2 else self.own[step]


class _Block:
    """The arithmetic on logits, at least in float32, for so few goals at a time that they stay in the cache.

    `teach`, then for every step `compare` and `differentiate`, which works in place on what `compare` left.
    """

    def __init__(self, rows: int, head_VD: Tensor, shared: bool, plan: _Plan) -> None:
        self.rows, self.plan = rows, plan
        self.differ = shared and plan.target  # the student's come as differences from the target's
        self.cap = plan.softcap if shared else None  # of the student's
        self.wide = torch.promote_types(head_VD.dtype, torch.float32)
        size = (rows, len(head_VD))
        count = 5 if plan.softcap is None else 7
        self.buffers = [
            torch.empty(size, dtype=self.wide, device=head_VD.device) for _ in range(count)
        ]

    def parts(self, goals: int) -> Iterator[slice]:
        """The goals of a chunk, a block at a time."""
        for start in range(0, goals, self.rows):
            yield slice(start, min(start + self.rows, goals))

    def teach(self, taught_BV: Tensor | None, label_B: Tensor) -> None:
        """Take in the goals of a block: the target's distribution, its negative entropy and its choice."""
        self.taught, self.logits, self.p, self.q, self.product, *capping = (
            buffer[: len(label_B)] for buffer in self.buffers
        )
        self.uncapped, self.slope = capping or (self.taught, self.product)  # no slope without a cap
        self.label_B1 = label_B.clamp(min=0).unsqueeze(1)
        self.known_B = (label_B >= 0).to(self.wide)
        if taught_BV is None:
            return
        self.taught.copy_(taught_BV)
        if self.plan.softcap is not None:
            self.uncapped.copy_(self.taught)
            _cap(self.taught, self.plan.softcap)
        torch.softmax(self.taught, dim=-1, out=self.p)
        self.log_sum = _log_sum(self.taught, self.p)
        if self.plan.divergence:
            self.negative_entropy = self._dot(self.p, self.taught) - self.log_sum
        if self.plan.measure:
            self.choice = self.taught.argmax(-1)

    def compare(self, projected_BV: Tensor) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """Values of the terms, alpha and agreement of the block at one step, [B] each."""
        self.logits.copy_(projected_BV)
        if self.differ:  # a sum of its own: of two dtypes it would be many times slower
            self.logits.add_(self.uncapped)
        if self.cap is not None:
            _cap(self.logits, self.cap)
            torch.div(self.logits, self.cap, out=self.slope).square_().neg_().add_(1)
        torch.softmax(self.logits, dim=-1, out=self.q)
        log_sum = _log_sum(self.logits, self.q)
        found = self._divergences(log_sum) | self._overlaps()
        if self.plan.any("lk"):
            self.blend = torch.exp(-self.plan.eta * self.alpha)
            found["lk"] = self.blend * found["kl"] + (1 - self.blend) * found["tv"]
        if self.plan.any("hard_ce"):
            chosen = self.logits.gather(1, self.label_B1).squeeze(1)
            found["hard_ce"] = (log_sum - chosen) * self.known_B
        if self.plan.any("reverse_kl"):  # last: the gradient needs the product
            if self.differ and self.cap is None:
                self.product.copy_(projected_BV)
            else:
                torch.sub(self.logits, self.taught, out=self.product)
            self.tilt = self._dot(self.q, self.product)
            found["reverse_kl"] = self.tilt - (log_sum - self.log_sum)
        if not self.plan.measure:
            return found, torch.zeros_like(log_sum), torch.zeros_like(self.known_B).bool()
        return found, self.alpha, self.logits.argmax(-1) == self.choice

    def differentiate(self, projected_BV: Tensor) -> None:
        """The sum's gradient by the logits, less `plan.factor`, into `projected_BV`.

        Works on q in place: call it once after `compare`. Letters as in the module's docstring.
        """
        plan, q = self.plan, self.q
        if plan.plain:
            projected_BV.copy_(self._before_cap(q.sub_(self.p)))
            return
        a_B = torch.full_like(q[:, 0], plan.pull)
        if plan.any("lk"):
            a_B += plan.of("lk") * self.blend
        b_B1 = a_B.unsqueeze(1).clone()
        if plan.any("tv", "nla", "lk"):
            c_B = self._variation()
            torch.mul(torch.lt(q, self.p, out=self.logits), q, out=self.logits)  # m q
            a_B += c_B * self.logits.sum(-1)
        if plan.any("hard_ce"):
            h_B = plan.of("hard_ce") * self.known_B
            a_B += h_B
        if plan.any("reverse_kl"):
            a_B -= plan.of("reverse_kl") * self.tilt
        q.mul_(a_B.unsqueeze(1))
        if plan.any("kl", "soft_ce", "lk"):
            q.addcmul_(self.p, b_B1, value=-1)
        if plan.any("tv", "nla", "lk"):
            q.addcmul_(self.logits, c_B.unsqueeze(1), value=-1)
        if plan.any("reverse_kl"):
            q.add_(self.product, alpha=plan.of("reverse_kl"))  # q d, left there by `compare`
        if plan.any("hard_ce"):
            q.scatter_add_(1, self.label_B1, -h_B.unsqueeze(1))
        projected_BV.copy_(self._before_cap(q))

    def _before_cap(self, gradient_BV: Tensor) -> Tensor:
        """The gradient by the student's logits before their cap, in place."""
        return gradient_BV if self.cap is None else gradient_BV.mul_(self.slope)

    def _divergences(self, log_sum_B: Tensor) -> dict[str, Tensor]:
        if not self.plan.cross:
            return {}
        cross = self._dot(self.p, self.logits) - log_sum_B  # sum_x p log q
        if not self.plan.divergence:
            return {"soft_ce": -cross}
        return {"soft_ce": -cross, "kl": self.negative_entropy - cross}

    def _overlaps(self) -> dict[str, Tensor]:
        if not self.plan.overlap:
            return {}
        self.alpha = torch.minimum(self.p, self.q, out=self.product).sum(-1)
        return {"tv": 1 - self.alpha, "nla": -self._floored_alpha().log()}

    def _floored_alpha(self) -> Tensor:
        return self.alpha.clamp(min=torch.finfo(self.alpha.dtype).tiny)

    def _variation(self) -> Tensor:
        """How much of total variation's gradient the sum holds [B]."""
        c_B = torch.full_like(self.alpha, self.plan.of("tv"))
        if self.plan.any("nla"):
            c_B += self.plan.of("nla") / self._floored_alpha()
        if self.plan.any("lk"):
            c_B += self.plan.of("lk") * (1 - self.blend)
        return c_B

    def _dot(self, left_BV: Tensor, right_BV: Tensor) -> Tensor:
        return torch.mul(left_BV, right_BV, out=self.product).sum(-1)


def _cached_rows(head_VD: Tensor) -> int:
    """Goals whose logits stay in the caches of the CPU's cores; elsewhere a whole chunk."""
    if head_VD.device.type != "cpu":
        return CHUNK
    return max(1, BLOCK_SCORES * torch.get_num_threads() // len(head_VD))


def _log_sum(logits_BV: Tensor, softmax_BV: Tensor) -> Tensor:
    """log sum exp of the logits [B], read off their largest entry: two quick passes in place of one with exp."""
    return logits_BV.amax(-1) - softmax_BV.amax(-1).log()


def _cap(logits_BV: Tensor, cap: float) -> None:
    logits_BV.div_(cap).tanh_().mul_(cap)
