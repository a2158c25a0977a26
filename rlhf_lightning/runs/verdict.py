"""What a run has shown, in plain words: for the last screen and the top of the report."""

from __future__ import annotations

import math
from dataclasses import replace

from rlhf_lightning.runs.quantities import duration, number, percent, show
from rlhf_lightning.runs.summary import Summary
from rlhf_lightning.runs.verdict_parts import (
    Fact,
    Metrics,
    Tone,
    Verdict,
    against,
    change,
    changes,
    get,
    interval,
)
from rlhf_lightning.runs.verdict_policy import compared, gold_win_rate

STAGES = {
    "base": "Base model",
    "sft": "Supervised fine-tuning",
    "reward": "Reward model",
    "ppo": "PPO",
    "collect": "Preference collection",
    "evaluate": "Evaluation",
    "pipeline": "Pipeline",
}


def verdict(summary: Summary) -> Verdict:
    """Return the verdict on a run from what its summary says.

    It reads the fixed keys of `metrics` and, where they are there, the same ones of the policy
    it started from: `val/baseline_score`, `val/baseline_response_length`,
    `val/baseline_distinct_2` and `val/baseline_loss`.
    """
    stage = _BY_STAGE.get(summary.stage, _other)
    result = stage(summary.metrics)
    facts = result.facts
    if "total" in summary.seconds:
        facts = (*facts, Fact("time", duration(summary.seconds["total"])))
    failed = [gate for gate in summary.gates if not gate.passed]
    tone: Tone = "bad" if failed else result.tone
    sentence = result.sentence
    if failed:
        names = ", ".join(gate.name for gate in failed)
        sentence = f"{sentence} It did not pass: {names}.".strip()
    if summary.status != "completed":
        tone = "bad" if summary.status == "failed" else "neutral"
        sentence = f"{_status(summary)} {sentence}".strip()
    return Verdict(tone, result.number, result.caption, sentence, facts, result.tone)


def _status(summary: Summary) -> str:
    if summary.status == "running":
        return "The run has not ended, or it was killed: resume=auto continues it."
    ended = "failed" if summary.status == "failed" else "was stopped before its end"
    why = f": {summary.cause.rstrip('.')}." if summary.cause else "."
    return f"The run {ended}{why} What follows is what it had reached."


def _ppo(metrics: Metrics) -> Verdict:
    return compared(metrics, "SFT", "PPO")


def _pipeline(metrics: Metrics) -> Verdict:
    """Return the verdict on the last stage; the figures of all are hundreds."""
    if "val/accuracy" in metrics:
        return _reward(metrics)
    return compared(metrics, "its baseline", "the last policy")


def _evaluate(metrics: Metrics) -> Verdict:
    result = compared(metrics, "the baseline", "the policy")
    others = [
        Fact(
            f"win rate by {label}",
            percent(rate),
            interval(metrics, f"val/{name}_win_rate").strip(" ()"),
        )
        for name, label in (
            ("score", "score"),
            ("judge", "the judge"),
            ("human", "people"),
            ("gold_reference", "gold, against references"),
        )
        if (rate := get(metrics, f"val/{name}_win_rate")) is not None
    ]
    rate = get(metrics, "val/human_reward_accuracy")
    if rate is not None:
        note = "of people's choices" + interval(metrics, "val/human_reward_accuracy")
        others.append(Fact("reward model agrees with", percent(rate), note))
    return replace(result, facts=(*others, *result.facts))


def _sft(metrics: Metrics) -> Verdict:
    facts = changes(metrics, "base")
    loss, before = get(metrics, "val/loss"), get(metrics, "val/baseline_loss")
    if loss is not None:
        known = None if before is None else _perplexity(before)
        facts[:0] = [
            change("held-out loss", loss, before, "base", "nats a token"),
            change("perplexity", _perplexity(loss), known, "base", ""),
        ]
    train = get(metrics, "sft/loss")
    if train is not None:
        facts.insert(min(2, len(facts)), Fact("training loss", number(train), "nats a token"))
    win = gold_win_rate(metrics, "base", "SFT", facts)
    if win is not None:
        return win
    if loss is None:
        return Verdict("neutral", "", "", "No held-out loss was recorded.", tuple(facts))
    choices = number(_perplexity(loss))
    sentence = f"It is as unsure as between {choices} equally likely next tokens"
    if before is not None:
        sentence += f", before training as between {number(_perplexity(before))}"
    sentence += "."
    caption = "nats a token, loss on held-out answers"
    return Verdict("neutral", number(loss), caption, sentence, tuple(facts))


def _perplexity(loss: float) -> float:
    return math.exp(min(loss, 50.0))


def _reward(metrics: Metrics) -> Verdict:
    facts = []
    ceiling, longer = get(metrics, "val/label_ceiling"), get(metrics, "val/longer_wins_accuracy")
    if ceiling is not None:
        facts.append(Fact("ceiling set by the labels", percent(ceiling), "the best anybody can do"))
    if longer is not None:
        facts.append(Fact("“the longer one wins”", percent(longer), "what length alone reaches"))
    matched = get(metrics, "val/accuracy_length_matched")
    if matched is not None:
        note = "lengths within 10 %" + interval(metrics, "val/accuracy_length_matched")
        facts.append(Fact("accuracy on pairs of one length", percent(matched), note))
    for name in ("val/calibration_error", "val/margin", "val/loss"):
        value = get(metrics, name)
        if value is not None:
            label = name.partition("/")[2].replace("_", " ")
            facts.append(Fact(label, show(name, value)))
    accuracy = get(metrics, "val/accuracy")
    if accuracy is None:
        return Verdict("neutral", "", "", "No held-out accuracy was recorded.", tuple(facts))
    rival = max(0.5, longer or 0.0)
    known = "chance" if rival == 0.5 else "length alone"
    tone: Tone
    side = against(metrics, "val/accuracy", rival)
    if side == "above":
        tone, sentence = "good", f"It ranks answers better than {known} does."
    elif side == "below":
        tone, sentence = "bad", f"It ranks answers worse than {known} does."
    else:
        tone = "undecided"
        sentence = f"Undecided: it is not shown to rank answers better than {known} does."
    caption = "of held-out pairs ranked as labelled" + interval(metrics, "val/accuracy")
    return Verdict(tone, percent(accuracy), caption, sentence, tuple(facts))


def _other(metrics: Metrics) -> Verdict:
    facts = [Fact(name, show(name, value)) for name, value in metrics.items() if value is not None]
    return Verdict("neutral", "", "", "", tuple(facts))


_BY_STAGE = {
    "ppo": _ppo,
    "reward": _reward,
    "sft": _sft,
    "base": _sft,
    "evaluate": _evaluate,
    "pipeline": _pipeline,
}
