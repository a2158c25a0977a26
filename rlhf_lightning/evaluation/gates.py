"""Gates: what a stage has to reach before the next one may build on it, and why it did not."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Mapping
from typing import Annotated, Any

from pydantic import AfterValidator

from rlhf_lightning.runs.summary import GateResult, Metrics, figure

Gate = Mapping[str, Any]
GAP = 0.05  # training minus held-out accuracy from which a model has learnt its pairs by heart
NEAR = 0.03  # of the ceiling: nothing but the labels keeps it from being better
LOW = 0.88  # ceiling of labels that are themselves what keeps accuracy down
PROXY_GAINED = 0.65  # win rate by the learnt score from which training has done its part, and
PROXY_APART = 0.15  # how far the judge that counts then lags behind, to doubt the reward model
MOVED = 0.02  # nats a token, below which a policy has hardly left its start
FINISHED = 0.8  # share of responses that end by themselves, below which they do not know how
LEVER = "weight of the KL penalty (kl_coef, DPO: beta)"
UNMEASURED = "Choose gates on what is measured (gates=), or measure it (evaluation.gold, a judge)"
STAYED = f"It has moved little. Try more iterations, a larger learning rate or a smaller {LEVER}"


def explain_accuracy(accuracy: float, metrics: Metrics) -> str:
    """Return the likely cause of a low `val/accuracy`, with its evidence and what to try.

    The first that applies: overfitting, if accuracy on training pairs exceeds that on held-out ones
    by more than 0.05; noise, if the labels allow less than 0.88 and the interval of the held-out
    accuracy reaches what lies 0.03 below that; too little capacity or training if the labels are
    known to allow more; else the run that would tell.

    Args:
        accuracy: value of `val/accuracy`.
        metrics: where measured `val/accuracy_high` (0.03 above it without),
            `val/train_accuracy` and `val/label_ceiling`.
    """
    names = ("train_accuracy", "label_ceiling", "accuracy_high")
    train, ceiling, high = (figure(metrics, f"val/{name}") for name in names)
    high = accuracy + NEAR if high is None else high
    if train is not None and train - accuracy > GAP:
        fix = "Try fewer epochs, more pairs, label_smoothing or weight decay"
        return f"Overfitting: {train:.3f} on training pairs. {fix}"
    if ceiling is not None and ceiling < LOW and high >= ceiling - NEAR:
        return f"Noise: the labels allow no more than {ceiling:.3f}. Try more raters a pair"
    if ceiling is not None:
        fix = "Try more epochs or pairs, then a larger model"
        return f"Capacity or too little training: the labels allow {ceiling:.3f}. {fix}"
    return "Noise or capacity: train a larger model on the same pairs and compare the two"


def _explain(metric: str, bound: str, threshold: float, metrics: Metrics) -> str:
    """Return the likely cause of a gate that failed, and what to try; "" where neither is known."""
    value = figure(metrics, metric) or 0.0
    if figure(metrics, "rollout/score_std_max") == 0:
        return "Every response of the training got the same score: mend the reward first"
    if metric == "val/accuracy" and bound == "at_least":
        return explain_accuracy(value, metrics)
    if metric == "val/accuracy":
        return "Length alone ranks the pairs as well. Try pairs whose lengths are matched"
    if metric == "val/kl_per_token" and bound == "at_most":
        return f"Too far from its start. Try a larger {LEVER} or fewer iterations"
    if metric == "val/kl_per_token":
        return STAYED
    if "win_rate" in metric:
        return _explain_win_rate(metric, threshold, metrics)
    if "refusal" in metric:
        fix = "Look at the reward model's accuracy on harmful prompts; try more such pairs"
        return f"What is refused has changed for the worse. {fix}, or a larger {LEVER}"
    return ""


def _explain_win_rate(metric: str, threshold: float, metrics: Metrics) -> str:
    """Return why the judge of `metric`, a win rate or an end of its interval, sees too few wins."""
    name = metric.removesuffix("_low")
    others = ("val/score_win_rate", "val/kl_per_token", "val/eos_fraction")
    known = (figure(metrics, each) for each in (name, f"{name}_high", *others))
    rate, high, proxy, kl, finished = known
    if kl is not None and kl < MOVED:
        return STAYED
    if finished is not None and finished < FINISHED:
        fix = "Train responses that end with EOS, or try a larger evaluation.max_new_tokens"
        return f"Only {finished:.3f} of its responses end by themselves. {fix}"
    if proxy is not None and proxy >= max(PROXY_GAINED, (rate or 0.0) + PROXY_APART):
        fix = f"Train it on pairs of this policy's responses, or try a larger {LEVER}"
        return f"By the learnt reward, which pays for the wrong things, it wins {proxy:.3f}. {fix}"
    if metric.endswith("_low") and rate is not None and rate >= threshold:
        return f"The rate itself is {rate:.3f}. Try a larger evaluation.num_prompts"
    if rate is not None and (rate if high is None else high) < 0.5:
        return f"It loses. Read the samples, then try a larger {LEVER}, or other data"
    return "It was not trained far enough. Try more iterations or a larger learning rate"


_HOLDS = {"at_least": operator.ge, "at_most": operator.le, "above": operator.gt}
BOUNDS = tuple(_HOLDS)
KEYS = ("metric", *BOUNDS, "or_near", "optional")
NEAR_KEYS = ("metric", "within", "where_below")


def check_gates(
    gates: Mapping[str, Gate], metrics: Metrics, *, required: Collection[str] = ()
) -> tuple[GateResult, ...]:
    """Compare final metrics with thresholds; see `docs/evaluation.md`.

    Args:
        gates: name -> {metric, and one of at_least, at_most (numbers) and above (a metric)}, with
            `or_near` and `optional` where wanted. An optional one need not be measured; a metric
            that is there and not finite fails it.
        metrics: final metrics of the run.
        required: metrics that were requested, so that their gates are not optional.
    """
    return tuple(_check_gate(name, gate, metrics, required) for name, gate in gates.items())


def gate_problem(gate: Any) -> str | None:
    """Return the fault of a gate in a configuration, or None."""
    if not isinstance(gate, Mapping):
        return "must be a group {metric: ..., at_least: ...}"
    if unknown := [key for key in gate if key not in KEYS]:
        return f"has the unknown key {unknown[0]}: use {', '.join(KEYS)}"
    bounds = {key: gate[key] for key in BOUNDS if gate.get(key) is not None}
    fit = [isinstance(x, str) if key == "above" else _is_number(x) for key, x in bounds.items()]
    if not isinstance(gate.get("metric"), str) or not gate["metric"] or fit != [True]:
        wanted = "at_least, at_most (finite numbers) and above (the name of a metric)"
        return f"needs metric and exactly one of {wanted}"
    if not isinstance(gate.get("optional"), bool | None):
        return f"optional={gate['optional']!r} must be true or false"
    if (near := gate.get("or_near")) is not None:
        is_near = isinstance(near, Mapping) and set(near) == set(NEAR_KEYS) and "at_least" in bounds
        if not (is_near and _is_number(near["within"]) and _is_number(near["where_below"])):
            return f"or_near goes with at_least and has the keys {', '.join(NEAR_KEYS)}"
    return None


def _checked_gate(gate: Any) -> Any:
    if problem := gate_problem(gate):
        raise ValueError(f" {problem}")
    return gate


CheckedGate = Annotated[Any, AfterValidator(_checked_gate)]


def _check_gate(name: str, gate: Gate, metrics: Metrics, required: Collection[str]) -> GateResult:
    metric = gate["metric"]
    value = figure(metrics, metric)
    bound = next(key for key in BOUNDS if gate.get(key) is not None)
    threshold = figure(metrics, gate[bound]) if bound == "above" else float(gate[bound])
    if value is None or threshold is None:
        missing = metric if value is None else gate[bound]
        if missing in metrics:
            return GateResult(name, value, threshold, False, f"{missing} is not a finite number")
        optional = bool(gate.get("optional")) and metric not in required
        told = ", and need not be" if optional else f". {UNMEASURED}"
        return GateResult(name, value, threshold, optional, f"{missing} was not measured{told}")
    wanted = f"{bound.replace('_', ' ')} {threshold:g}"
    if bound == "above":
        wanted = f"above {gate[bound]} = {threshold:.3f}"
    near = gate.get("or_near") or {}
    ceiling = figure(metrics, near["metric"]) if near else None
    if ceiling is not None and ceiling < near["where_below"]:
        threshold = min(threshold, ceiling - near["within"])
        wanted = f"at least {threshold:.3f}, {near['within']:g} below {near['metric']}"
    passed = _HOLDS[bound](value, threshold)
    reason = f"{metric} is {value:.3f}, wanted {wanted}"
    if not passed and (hint := _explain(metric, bound, threshold, metrics)):
        reason = f"{reason}. {hint}"
    return GateResult(name, value, threshold, passed, reason)


def _is_number(value: Any) -> bool:
    is_real = isinstance(value, int | float) and not isinstance(value, bool)
    return is_real and math.isfinite(value)
