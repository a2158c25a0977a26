"""Gates: what a stage has to reach before the next one may build on it, and why it did not."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from rlhf_lightning.evaluation.diagnosis import explain_accuracy
from rlhf_lightning.runs.summary import GateResult

BOUNDS = ("at_least", "at_most", "above")
KEYS = ("metric", *BOUNDS, "or_near", "optional")
NEAR_KEYS = ("metric", "within", "where_below")
Gate = Mapping[str, Any]
Metrics = Mapping[str, float]


def check_gates(
    gates: Mapping[str, Gate], metrics: Metrics, *, required: Collection[str] = ()
) -> tuple[GateResult, ...]:
    """Hold final metrics against thresholds; see `docs/evaluation.md`.

    Args:
        gates: name -> {metric, and one of at_least, at_most (numbers) and above (a metric)}, with
            `or_near` and `optional` where wanted.
        metrics: final metrics.
        required: metrics that are asked for, so that their gates are not optional.

    Raises:
        ValueError: if a gate is none.
    """
    return tuple(
        _check_gate(name, {**gate, "optional": False} if _asked(gate, required) else gate, metrics)
        for name, gate in gates.items()
    )


def gate_problem(gate: Any) -> str | None:
    """Return what is wrong with a gate as it stands in a configuration, or None."""
    if not isinstance(gate, Mapping):
        return "must be a group {metric: ..., at_least: ...}"
    unknown = [key for key in gate if key not in KEYS]
    if unknown:
        return f"has the unknown key {unknown[0]}: use {', '.join(KEYS)}"
    bounds = [key for key in BOUNDS if gate.get(key) is not None]
    if not gate.get("metric") or len(bounds) != 1:
        return "needs metric and exactly one of at_least, at_most and above"
    bound = gate[bounds[0]]
    if bounds[0] == "above":
        if not isinstance(bound, str):
            return f"above={bound!r} must be the name of a metric"
    elif not _is_number(bound):
        return f"{bounds[0]}={bound!r} must be a number"
    near = gate.get("or_near")
    if near is not None and (
        bounds[0] != "at_least"
        or not isinstance(near, Mapping)
        or set(near) != set(NEAR_KEYS)
        or not (_is_number(near["within"]) and _is_number(near["where_below"]))
    ):
        return f"or_near goes with at_least and has the keys {', '.join(NEAR_KEYS)}"
    return None


def _asked(gate: Gate, required: Collection[str]) -> bool:
    return isinstance(gate, Mapping) and gate.get("metric") in required


def _check_gate(name: str, gate: Gate, metrics: Metrics) -> GateResult:
    problem = gate_problem(gate)
    if problem:
        raise ValueError(f"gate {name} {problem}")
    metric = gate["metric"]
    value = _measured(metrics, metric)
    bound = next(key for key in BOUNDS if gate.get(key) is not None)
    threshold = _measured(metrics, gate[bound]) if bound == "above" else float(gate[bound])
    if value is None or threshold is None:
        missing = metric if value is None else gate[bound]
        optional = bool(gate.get("optional"))
        told = ", and need not be" if optional else ""
        return GateResult(name, value, threshold, optional, f"{missing} was not measured{told}")
    wanted = f"{bound.replace('_', ' ')} {threshold:g}"
    if bound == "above":
        wanted = f"above {gate[bound]} = {threshold:.3f}"
    near = gate.get("or_near") or {}
    ceiling = _measured(metrics, near["metric"]) if near else None
    if ceiling is not None and ceiling < near["where_below"]:
        threshold = min(threshold, ceiling - near["within"])
        wanted = f"at least {threshold:.3f}, {near['within']:g} below {near['metric']}"
    passed = _holds(bound, value, threshold)
    reason = f"{metric} is {value:.3f}, wanted {wanted}"
    if not passed and metric == "val/accuracy" and bound == "at_least":
        reason = f"{reason}. {explain_accuracy(metrics)}"
    return GateResult(name, value, threshold, passed, reason)


def _holds(bound: str, value: float, threshold: float) -> bool:
    if bound == "above":
        return value > threshold
    return value >= threshold if bound == "at_least" else value <= threshold


def _measured(metrics: Metrics, name: str) -> float | None:
    value = metrics.get(name)
    return None if value is None or math.isnan(value) else float(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
