"""What a run has shown, in plain words: for the last screen and the top of the report."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from rlhf_lightning.runs.metric_catalog import duration, number, percent, show
from rlhf_lightning.runs.summary import Summary

Metrics = Mapping[str, float | None]
# `undecided`: an interval holds what the figure is held against.
Tone = Literal["good", "bad", "neutral", "undecided"]


@dataclass(frozen=True)
class Fact:
    """One figure beside the verdict.

    Args:
        label: what was measured.
        value: the figure as text.
        note: what to hold it against, or "".
    """

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Verdict:
    """The outcome of a run.

    Args:
        tone: whether it is what one hoped for, gates and ending included.
        number_tone: the same of the one figure alone.
        number: the one figure that says most, as text; "" if nothing was measured.
        caption: what that figure is.
        sentence: what it means.
        facts: the other figures.
    """

    tone: Tone
    number: str
    caption: str
    sentence: str
    facts: tuple[Fact, ...]
    number_tone: Tone = "neutral"


def changes(metrics: Metrics, rival: str) -> list[Fact]:
    """Return what was measured of the policy and of the one it started from."""
    facts = []
    for key, label, unit in (
        ("score", "score", ""),
        ("gold", "gold reward", ""),
        ("exact_match", "exact matches", "share"),
        ("first_word_match", "right first words", "share"),
        ("solved", "right numbers", "share"),
        ("answered", "answers with a number", "share"),
        ("response_length", "response length", "tokens"),
        ("distinct_2", "distinct bigrams", "share"),
        ("refusal_rate", "harmful prompts refused", "share"),
        ("over_refusal_rate", "harmless look-alikes refused", "share"),
    ):
        value = get(metrics, f"val/{key}")
        if value is not None:
            before = get(metrics, f"val/baseline_{key}")
            facts.append(change(label, value, before, rival, unit))
    return facts


def change(label: str, value: float, before: float | None, rival: str, unit: str) -> Fact:
    """Return a figure before and after."""
    plain = "" if unit == "share" else unit
    if before is None:
        return Fact(label, percent(value) if unit == "share" else number(value), plain)
    if unit == "share":
        change = f"{percent(before)} → {percent(value)}"
    else:
        like = max(abs(before), abs(value))  # both with the digits that the larger one deserves
        change = f"{number(before, like=like)} → {number(value, like=like)}"
    return Fact(label, change, f"{rival} → now" + (f", {plain}" if plain else ""))


def interval(metrics: Metrics, name: str) -> str:
    """Return the interval of a share in brackets, "" where none was measured."""
    low, high = get(metrics, f"{name}_low"), get(metrics, f"{name}_high")
    if low is None or high is None:
        return ""
    return f" (95 % interval {100 * low:.1f} to {100 * high:.1f} %)"


def get(metrics: Metrics, name: str) -> float | None:
    """Return a figure, None where it was not measured or is not finite."""
    value = metrics.get(name)
    return None if value is None or not math.isfinite(value) else float(value)


def against(metrics: Metrics, name: str, rival: float) -> Literal["above", "below", "undecided"]:
    """Return where the whole interval of a figure lies; without one, where the figure does."""
    rate = get(metrics, name) or 0.0
    low, high = get(metrics, f"{name}_low"), get(metrics, f"{name}_high")
    if (rate if low is None else low) > rival:
        return "above"
    return "below" if (rate if high is None else high) < rival else "undecided"


SPREAD = "rollout/score_std_max"


def compared(metrics: Metrics, rival: str, name: str) -> Verdict:
    """Return the verdict by the judge that counts most, of those that were asked."""
    facts = changes(metrics, rival)
    kl = get(metrics, "val/kl_per_token")
    if kl is not None:
        facts.insert(1, Fact(f"KL from {rival}", number(kl), "nats a token"))
    if get(metrics, SPREAD) == 0:
        return _without_signal(metrics, facts)
    win = gold_win_rate(metrics, rival, name, facts)
    if win is None:
        win = _score_win_rate(metrics, rival, name, facts)
    if win is not None:
        return win
    score, before = get(metrics, "val/score"), get(metrics, "val/baseline_score")
    if score is None:
        return Verdict("neutral", "", "", "No evaluation was recorded.", tuple(facts))
    if before is None:
        caption = "mean score on held-out prompts"
        return Verdict("neutral", number(score), caption, "", tuple(facts))
    better = score > before
    sentence = f"The score {'rose' if better else 'did not rise'}; no gold reward says if rightly."
    gain = number(score - before)
    number_text = f"+{gain}" if better else gain
    tone: Tone = "neutral" if better else "bad"
    caption = f"change of the mean score, {rival} to {name}"
    return Verdict(tone, number_text, caption, sentence, tuple(facts))


def gold_win_rate(metrics: Metrics, rival: str, name: str, facts: list[Fact]) -> Verdict | None:
    """Return the verdict by the gold reward, None where it is not known."""
    rate = get(metrics, "val/gold_win_rate")
    if rate is None:
        return None
    tone: Tone
    who = f"{name[0].upper()}{name[1:]}"
    side = against(metrics, "val/gold_win_rate", 0.5)
    if side == "above":
        tone, sentence = "good", f"{who} answers better than {rival}, by the gold reward."
    elif side == "below":
        tone, sentence = "bad", f"{who} answers worse than {rival}, by the gold reward."
    else:
        tone = "undecided"
        sentence = (
            f"Undecided: no difference between {name} and {rival} is shown, as the interval holds "
            "one half."
        )
    caption = f"of comparisons won against {rival}" + interval(metrics, "val/gold_win_rate")
    return Verdict(tone, percent(rate), caption, sentence, tuple(facts))


def _score_win_rate(metrics: Metrics, rival: str, name: str, facts: list[Fact]) -> Verdict | None:
    rate = get(metrics, "val/score_win_rate")
    if rate is None:
        return None
    if get(metrics, "val/score_tie_rate") == 1:
        sentence = (
            "No win rate: on every held-out prompt the score of both answers is the same, so it "
            "tells nothing apart."
        )
        return Verdict("bad", "", "", sentence, tuple(facts))
    tone: Tone
    who, by = f"{name[0].upper()}{name[1:]}", f"than {rival} by the reward it was trained on"
    side = against(metrics, "val/score_win_rate", 0.5)
    if side == "above":
        # Never "good": that the trained reward rises is what over-optimisation looks like, too.
        tone = "neutral"
        sentence = f"{who} scores higher {by}; read the samples to see if rightly."
    elif side == "below":
        tone, sentence = "bad", f"{who} scores lower {by}."
    else:
        tone = "undecided"
        sentence = f"Undecided: {name} is not shown to score higher or lower {by}."
    caption = f"of comparisons won against {rival}" + interval(metrics, "val/score_win_rate")
    return Verdict(tone, percent(rate), caption, sentence, tuple(facts))


def _without_signal(metrics: Metrics, facts: list[Fact]) -> Verdict:
    """Return the verdict on a run whose reward was a constant, whatever win rate came of it."""
    for judge, label in (("gold", "gold"), ("score", "score")):
        rate = get(metrics, f"val/{judge}_win_rate")
        if rate is not None:
            note = interval(metrics, f"val/{judge}_win_rate").strip(" ()")
            facts.append(Fact(f"win rate by {label}", percent(rate), note))
    sentence = (
        "The score did not vary: in every rollout all answers had the same one, so there was "
        "nothing to learn, and a win rate says nothing of this reward."
    )
    return Verdict("bad", "", "", sentence, tuple(facts))


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
