"""What format 2 of an evaluation adds, made up (no figure here was measured), and a comparison of three runs."""

from __future__ import annotations

import copy
import random
from typing import Any

OUTPUT_BINS = ((0, 256), (256, 1024), (1024, 4096), (4096, None))
PROMPT_BINS = ((0, 128), (128, 512), (512, 2048), (2048, 8192), (8192, None))
BATCHES = (1, 2, 4, 8, 16, 32, 64)
NAMES = ("baseline", "three-step rollout", "no input norms")


def enriched(evaluation: dict[str, Any]) -> dict[str, Any]:
    """A format-1 evaluation with every addition of format 2."""
    rng = random.Random(6)
    told = copy.deepcopy(evaluation)
    told["format"] = 2
    for modes in told["sets"].values():
        for whole in modes.values():
            whole |= cuts(rng, whole)
    found = told["validation"]
    served, trained = found["engine"], found["training"]
    found["difference"] = {name: served[name] - trained[name] for name in served}
    told["head"]["config"] = {"enorm": True, "init": "last_layer", "loss": {"kl": 1.0, "tv": 0.0}}
    told["accounting"] = {
        name: {
            "input": 66,
            "used": 61,
            "repaired": {"no answer asked for": 2},
            "refused": {"longer than the model": 3},
            "examples": {"longer than the model": [f"{name}/12", f"{name}/40"]},
            "notes": {},
        }
        for name in told["sets"]
    }
    told["grid"] = [
        grid_row(rng, told, name, temperature, k)
        for name in told["sets"]
        for temperature in (0.0, 0.6, 1.0)
        for k in (1, 2, 3, 5)
    ]
    told["speed_model"] = speed_model(rng, told["sets"]["heldout"]["greedy"]["per_position"])
    return told


def cuts(rng: random.Random, whole: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "by_output_position": [
            part(rng, whole, 1 - 0.10 * i, 4 + i) | {"from": low, "to": high}
            for i, (low, high) in enumerate(OUTPUT_BINS)
        ],
        "by_prompt_length": [
            part(rng, whole, 1 - 0.07 * i, 3 + i) | {"from": low, "to": high}
            for i, (low, high) in enumerate(PROMPT_BINS)
        ],
        "by_turn": [part(rng, whole, share, 2) | {"turn": i} for i, share in ((1, 1.0), (2, 0.93))],
    }
    shares, n = whole["conditional"], whole["drafts"]
    expected = [share + rng.uniform(-0.01, 0.01) for share in shares]
    return found | {
        "conversations": whole["prompts"] // 2,
        "tau_macro_ci": around(whole["tau_macro"], 0.07),
        "acceptance_rate_ci": around(whole["acceptance_rate"], 0.02),
        "conditional_ci": [around(share, 0.03 + i / 50) for i, share in enumerate(shares)],
        "alpha_expected": {
            "per_position": expected,
            "per_position_ci": [around(alpha, 0.025) for alpha in expected],
            "steps": [n, *(round(n * share) for share in whole["per_position"][:-1])],
        },
    }


def around(value: float, half: float) -> list[float]:
    return [value - half, value + half]


def part(rng: random.Random, whole: dict[str, Any], share: float, divisor: int) -> dict[str, Any]:
    """A part of the prompts, whose drafts fare `share` as well."""
    per_position = [value * share * rng.uniform(0.95, 1.05) for value in whole["per_position"]]
    tau, spread = 1 + sum(per_position), 0.04 * divisor**0.5
    return {
        "prompts": whole["prompts"] // divisor + 1,
        "tokens": whole["tokens"] // divisor,
        "drafts": whole["drafts"] // divisor,
        "tau": tau,
        "tau_ci": around(tau, spread),
        "per_position": per_position,
        "per_position_ci": [around(value, 0.02) for value in per_position],
    }


def grid_row(
    rng: random.Random, told: dict[str, Any], name: str, temperature: float, k: int
) -> dict[str, Any]:
    known = told["sets"][name]["greedy"]["per_position"]
    per_position = [
        (1 - 0.2 * temperature) * (known[i] if i < 3 else known[2] * 0.4 ** (i - 2))
        for i in range(k)
    ]
    tau = 1 + sum(per_position) + rng.uniform(-0.01, 0.01)
    return {
        "set": name,
        "temperature": temperature,
        "k": k,
        "prompts": 24,
        "tokens": 2400,
        "drafts": 1400,
        "tau": tau,
        "tau_ci": around(tau, 0.055),
        "per_position": per_position,
        "per_position_ci": [around(value, 0.015) for value in per_position],
    }


def speed_model(rng: random.Random, per_position: list[float]) -> dict[str, Any]:
    chances = [*per_position, *(per_position[2] * 0.5**i for i in range(1, 6))]
    predicted = []
    for batch in BATCHES:
        for k in range(1, 9):
            cost = 1 + (0.02 + 0.008 * batch**0.8) * k + 0.06 * k
            speedup = (1 + sum(chances[:k])) / cost
            extrapolated = k > 3 or batch > 16
            predicted.append(
                {"batch": batch, "k": k, "speedup": speedup, "extrapolated": extrapolated}
            )
    expected = {(row["batch"], row["k"]): row["speedup"] for row in predicted}
    best = {b: max(range(1, 9), key=lambda k, b=b: expected[b, k]) for b in BATCHES}
    return {
        "costs": {
            "cached": 256,
            "repeats": 9,
            "batches": [cost_row(rng, batch) for batch in (1, 4, 16)],
        },
        "predicted": predicted,
        "measured": [
            {
                "batch": batch,
                "k": k,
                "speedup": expected[batch, k] * rng.uniform(0.95, 1.03),
                "predicted": expected[batch, k],
                "predicted_own_tau": expected[batch, k] * rng.uniform(0.97, 1.03),
                "tau": 1 + sum(chances[:k]),
                "running": batch * 0.93,
            }
            for batch in (1, 4, 16)
            for k in (1, 2, 3)
        ],
        "recommended": {str(b): k if expected[b, k] > 1 else 0 for b, k in best.items()},
    }


def cost_row(rng: random.Random, batch: int) -> dict[str, Any]:
    target = [0.025 * (1 + 0.03 * batch * rows) for rows in range(1, 10)]
    return {
        "batch": batch,
        "target": target,
        "observe": [0.0015 * (1 + 0.1 * rows) for rows in range(1, 10)],
        "draft": 0.0012 + 0.0001 * batch,
        "noise": {"target": rng.uniform(0.01, 0.05), "observe": 0.031, "draft": 0.022},
        "verified_row": [target[k] / ((k + 1) * target[0]) for k in range(1, 9)],
    }


def comparison() -> dict[str, Any]:
    """Three runs: the second better than both others on held-out prompts, the third no different from the first."""
    rng = random.Random(8)
    gains = {(0, 1): 0.16, (0, 2): 0.01, (1, 2): -0.15}
    pairs = [
        compared_metric(rng, NAMES[a], NAMES[b], name, mode, metric, gain / share)
        for (a, b), gain in gains.items()
        for name, mode, share in (
            ("heldout", "greedy", 1),
            ("heldout", "sampled", 2),
            ("ood", "greedy", 8),
        )
        for metric in ("tau", "tokens", "per_position/1", "per_position/2", "per_position/3")
    ]
    return {"runs": [run_card(i) for i in range(3)], "pairs": pairs, "left_out": left_out()}


def compared_metric(
    rng: random.Random, a: str, b: str, name: str, mode: str, metric: str, gain: float
) -> dict[str, Any]:
    value = {"tau": 1.8, "tokens": 113.0}.get(metric, 0.4)
    difference = 0.0 if metric == "tokens" else gain + rng.uniform(-0.005, 0.005)
    ci = around(difference, 0.045)
    better = b if ci[0] > 0 else a if ci[1] < 0 else None
    return {
        "a": a,
        "b": b,
        "set": name,
        "mode": mode,
        "prompts": 48,
        "conversations": 46,
        "metric": metric,
        "a_value": value,
        "b_value": value + difference,
        "difference": difference,
        "ci": ci,
        "verdict": f"{better} is better" if better else "no difference shown",
    }


def run_card(index: int) -> dict[str, Any]:
    return {
        "name": NAMES[index],
        "path": f"runs/{NAMES[index].replace(' ', '-')}",
        "target": {"path": "models/made-up-135M-Instruct", "hash": "5af571cbf074e6d2"},
        "head": {"family": "mtp", "parameters": 4207104 - 1152 * (index == 2), "step": 960},
        "k": 3,
        "dtype": "bfloat16",
        "max_new_tokens": 128,
    }


def left_out() -> dict[str, Any]:
    reason = "not the same prompt in the other run"
    some = {"a": NAMES[0], "b": NAMES[1], "set": "ood", "mode": "greedy", "only_a": 2, "only_b": 0}
    return {
        "sets": [{"set": "mt_bench", "only": NAMES[1], "not_in": NAMES[0]}],
        "prompts": [some | {"reason": reason}],
    }


def many_sets(evaluation: dict[str, Any]) -> dict[str, Any]:
    """The sets of a larger evaluation: more than stand side by side in a chart."""
    told = copy.deepcopy(evaluation)
    for name in ("mt_bench", "humaneval", "gsm8k"):
        told["sets"][name] = copy.deepcopy(told["sets"]["ood"])
    return told
