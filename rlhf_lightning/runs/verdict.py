"""The verdict on a run: the figure that counts most, its interval, and the gates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from rlhf_lightning.runs import metric_catalog as catalog
from rlhf_lightning.runs.metric_catalog import counted, ends, number, percent, quantity, show
from rlhf_lightning.runs.summary import Metrics, Summary, figure

# `undecided`: the threshold lies inside the confidence interval.
Tone = Literal["good", "bad", "neutral", "undecided"]
FEW = 30  # prompts or pairs, below which a figure is no headline
# Whose win rate is the headline, the one that counts most first.
JUDGES = {"gold": "the gold reward", "human": "people", "judge": "the judge", "score": "the score"}
SPREAD = "rollout/score_std_max"
TRAINED_ON = "the reward it was trained on"
TEACHER = "val/teacher_kl_per_token"
_OWN = "val/chosen_reward"  # a policy's own rewards rank the pairs
_UNPAIRED = "val/kl"  # KTO's rows are single responses
_SAME = "identical_rate"
_MATCHED, _SHORTER = "val/accuracy_length_matched", "val/accuracy_chosen_shorter"
_BESIDE = (  # what is shown beside the headline, in order; with the baseline's where there is one
    *(f"val/{judge}_win_rate" for judge in JUDGES),
    *("val/human_reward_accuracy", "val/accuracy", "val/loss", "sft/loss"),
    *("val/score", "val/gold", "val/kl_per_token", "val/kl_per_response", "val/exact_match"),
    *("val/first_word_match", "val/solved", "val/answered", "val/response_length"),
    *("val/eos_fraction", "val/distinct_2", "val/refusal_rate", "val/over_refusal_rate"),
    *("val/label_ceiling", "val/longer_wins_accuracy", _MATCHED, _SHORTER),
    *("val/calibration_error", "val/margin", _OWN),
    *("collect/num_pairs", "collect/validation_records", "collect/usable_candidates"),
    *("collect/automatic_share", "collect/raw_agreement", "collect/hours", "collect/hours_before"),
    *("collect/judge_unreadable", "collect/score", "collect/gold", "collect/score_best"),
    *("collect/gold_best", "collect/gold_train"),
)
# Of how many prompts a share of refusals is.
_ASKED = {"val/refusal_rate": "val/num_harmful", "val/over_refusal_rate": "val/num_harmless"}
_BEST_OF = ("gold_win_rate", "pass_at_k", "maj_at_k", "score")


@dataclass(frozen=True)
class Fact:
    """One figure beside the verdict.

    Args:
        label: name of the figure.
        value: the figure as text.
        note: what to compare it with, or "".
    """

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Verdict:
    """The outcome of a run.

    Args:
        tone: good or bad, gates and ending included.
        number: the headline figure as text; "" if nothing was measured.
        caption: the name of that figure.
        sentence: what the figure means, in one sentence.
        facts: the other figures, in order.
        number_tone: the tone of the headline figure alone.
    """

    tone: Tone = "neutral"
    number: str = ""
    caption: str = ""
    sentence: str = ""
    facts: tuple[Fact, ...] = ()
    number_tone: Tone = "neutral"


def verdict(summary: Summary) -> Verdict:
    """Return the verdict on a run from what its summary says.

    What was measured decides what is the headline: a win rate by the judge that counts most, else
    the pairs that are ranked as labelled, else the held-out loss, else the score.
    """
    found = Verdict(sentence="It runs, and nothing was judged.")
    if summary.judged:
        by = TRAINED_ON if SPREAD in summary.metrics else ""
        if (given := summary.about.get("compared by")) is not None:  # from Python, by any reward
            by = TRAINED_ON if given == summary.about.get("reward") else f"the reward “{given}”"
        found = _measured(summary.metrics, by)
        doubt = doubt_of(summary.alerts)
        told = " ".join(filter(None, (found.sentence, summary.warning, doubt)))
        found = replace(found, sentence=told)
        if doubt and found.tone == "good":
            found = replace(found, tone="neutral")
    facts = found.facts
    if "total" in summary.seconds:
        facts = (*facts, Fact("time", catalog.duration(summary.seconds["total"])))
    tone, sentence = found.tone, found.sentence
    if failed := [gate.name for gate in summary.gates if not gate.passed]:
        tone, sentence = "bad", f"{sentence} Failed gates: {', '.join(failed)}."
    if summary.status != "completed":
        tone = "bad" if summary.status == "failed" else "neutral"
        ended = f"The run {summary.status}"
        if summary.status == "running":
            ended = "The run has not ended, or it was killed: resume=auto continues it"
        elif summary.cause:
            ended += f": {summary.cause.rstrip('.')}"
        sentence = f"{ended}. {sentence}"
    return Verdict(tone, found.number, found.caption, sentence.strip(), facts, found.tone)


def doubt_of(alerts: Iterable[Mapping[str, Any]]) -> str:
    """Return what the doctor still said at the end against the figures of a run; or ""."""
    left = [one["message"].partition(" [")[0] for one in alerts if one["cleared_at"] is None]
    told = "; ".join(f"{title[:1].lower()}{title[1:]}" for title in left)
    return told and f"But the doctor warns: {told}."


def _measured(metrics: Metrics, by: str) -> Verdict:
    """Return the headline with the other figures; `by` names the score, if need be.

    A figure of fewer than 30 prompts or pairs is no headline, but the first of the others.
    """
    name, found = _headline(metrics, by)
    facts = tuple(fact for key, fact in _facts(metrics).items() if key != name)
    known = f"95 % interval {ends(metrics, name)}" if name and ends(metrics, name) else ""
    count, noun = _trials(metrics, name)
    if count is None or count >= FEW:
        caption = f"{found.caption} ({known})" if known else found.caption
        return replace(found, caption=caption, facts=facts)
    few = f"{counted(count, noun)} {'is' if count == 1 else 'are'} too few"
    return Verdict(
        sentence=f"No headline: {few}, {FEW} are needed. Hold out more for one.",
        facts=(Fact(found.caption.removeprefix("of "), found.number, known), *facts),
    )


def _headline(metrics: Metrics, by: str) -> tuple[str, Verdict]:
    """Return the verdict by the strongest evidence there is, and the metric that it is; or ""."""
    if figure(metrics, SPREAD) == 0:
        sentence = "The score did not vary in any rollout, so there was nothing to learn."
        return "", Verdict("bad", sentence=sentence)
    best_of = {n: f"best_of/{n}/gold_win_rate" for n in catalog.best_of_counts(metrics)}
    if counts := [n for n, name in best_of.items() if figure(metrics, name) is not None]:
        who = f"The best of {counts[-1]} responses is"
        note = f", by the best of {counts[-1]}"
        return _compared(metrics, best_of[counts[-1]], who, JUDGES["gold"], note)
    if figure(metrics, TEACHER) is not None and SPREAD not in metrics:  # no reward
        return _against_before(metrics, TEACHER, "nats a token, KL to the teacher")
    for judge, who in JUDGES.items():
        if figure(metrics, name := f"val/{judge}_win_rate") is not None:
            if judge == "score" and figure(metrics, "val/score_tie_rate") == 1:
                alike = "No win rate: on every held-out prompt both responses have the same score."
                return "", Verdict("bad", sentence=alike)
            told = by if by and judge == "score" else who
            return _compared(metrics, name, "The policy answers", told, _skipped(metrics, judge))
    for phase in ("val", "benchmark"):
        if figure(metrics, f"{phase}/accuracy") is not None:
            return _ranked(metrics, phase)
    if figure(metrics, "val/loss") is not None:
        return _against_before(metrics, "val/loss", "nats a token, loss on held-out rows")
    if figure(metrics, "val/score") is not None:
        return _against_before(metrics, "val/score", "mean score on held-out prompts")
    if (score := figure(metrics, "benchmark/score")) is not None:
        caption = f"mean of {metrics['benchmark/num_subsets'] or 0:.0f} subsets of RewardBench 2"
        return "", Verdict("neutral", percent(score), caption)
    if records := figure(metrics, "collect/train_records"):
        sentence = "" if "collect/gold_train" in metrics else "Read some of the records."
        return "", Verdict("neutral", f"{records:,.0f}", "records to train on", sentence)
    if broken := [name for name in ("val/accuracy", "val/loss", "val/score") if name in metrics]:
        return "", Verdict("bad", sentence=f"{broken[0]} is not a finite number.")
    if skipped := figure(metrics, "val/judge_skipped"):
        told = f"The judge gave no verdict: it skipped all {counted(skipped, 'pair')}."
        return "", Verdict(sentence=told)
    return "", Verdict(sentence="Nothing scored or judged the responses.")


def _compared(metrics: Metrics, name: str, who: str, by: str, note: str) -> tuple[str, Verdict]:
    """Return the verdict by a win rate over the baseline."""
    ties = figure(metrics, name.replace("win_rate", "tie_rate"))
    count, noun = _trials(metrics, name)
    on = "" if count is None else f" on {counted(count, noun)}"
    caption = f"of comparisons with the baseline{on} won{', ties one half' * bool(ties)}{note}"
    rival = f"the baseline{f', by {by}' * bool(by)}"
    # The score is never "good": that it rises is what over-optimisation looks like, too.
    of_score = name == "val/score_win_rate"
    doubt = "; read the samples to see what the score pays for" * of_score
    sentence = f"{who} {{}} than {rival}{doubt}."
    best: Tone = "neutral" if of_score else "good"
    return name, _by_interval(metrics, name, 0.5, caption, sentence, best)


def _ranked(metrics: Metrics, phase: str) -> tuple[str, Verdict]:
    """Return the verdict by the pairs that are ranked as labelled, which a policy need not be."""
    more, longer = (figure(metrics, f"{phase}/{n}_accuracy") for n in ("majority", "longer_wins"))
    rivals = {"the more frequent label": more or 0.0, "chance": 0.5, "length alone": longer or 0.0}
    known = max(rivals, key=lambda name: rivals[name])
    own, name = _OWN in metrics, f"{phase}/accuracy"
    what = "on their label's side" if _UNPAIRED in metrics else "ranked as labelled"
    caption = f"of {pairs_of(metrics, name, 'held-out ' * (phase == 'val'))} {what}"
    warning = "No judge compares its responses." if own else prefers_longer(metrics, phase)
    sentence = f"It ranks responses {{}} than {known}. {warning}".strip()
    best: Tone = "neutral" if own else "good"
    return name, _by_interval(metrics, name, rivals[known], caption, sentence, best)


def _by_interval(
    metrics: Metrics, name: str, rival: float, caption: str, sentence: str, best: Tone
) -> Verdict:
    """Return the verdict by a share whose interval lies above, below or around that of a rival.

    Without an interval the share itself decides. `{}` in the sentence is what the share is, and
    `best` the tone of one above.
    """
    rate = figure(metrics, name) or 0.0
    low, high = figure(metrics, f"{name}_low"), figure(metrics, f"{name}_high")
    if (rate if low is None else low) > rival:
        return Verdict(best, percent(rate), caption, sentence.replace("{}", "better"))
    if (rate if high is None else high) < rival:
        return Verdict("bad", percent(rate), caption, sentence.replace("{}", "worse"))
    either = sentence.replace("{}", "better or worse")
    told = f"Undecided: nothing shows that {either[0].lower()}{either[1:]}"
    return Verdict("undecided", percent(rate), caption, told)


def _against_before(metrics: Metrics, name: str, caption: str) -> tuple[str, Verdict]:
    """Return the verdict by a figure beside that of the baseline; only the score should rise."""
    value, before = figure(metrics, name) or 0.0, figure(metrics, name.replace("/", "/baseline_"))
    tone: Tone = "neutral"
    sentence = "No baseline was measured, so nothing says whether it got better."
    if before is not None:
        better = value > before if name == "val/score" else value < before
        better = better and number(value) != number(before)
        tone = ("good" if name == TEACHER else "neutral") if better else "bad"
        sentence = f"{'Better' if better else 'No better'} than before: it was {number(before)}."
    return name, Verdict(tone, number(value), caption, sentence)


def _trials(metrics: Metrics, name: str) -> tuple[float | None, str]:
    """Return of how many pairs or prompts the headline is, None where that is not known."""
    of = name.replace("win_rate" if "win_rate" in name else "accuracy", "num_pairs")
    if of != name and of in metrics:
        if (prompts := figure(metrics, of.replace("num_pairs", "num_pair_prompts"))) is not None:
            return prompts, "prompt"
        pairs, same = (figure(metrics, of.replace("num_pairs", n)) for n in ("num_pairs", _SAME))
        if pairs is None or same is None:
            return pairs, "pair"
        # Ties of equal responses are in the rate, as many as if all pairs had a verdict.
        return round(pairs / (1 - same)) if same < 1 else pairs, "prompt"
    asked = figure(metrics, "val/num_prompts") if name else None
    unscored = figure(metrics, name.replace("win_rate", "unscored")) if "win_rate" in name else None
    # A prompt with a response that has no score is in no win rate.
    return asked if asked is None else round(asked * (1 - (unscored or 0.0))), "prompt"


def _facts(metrics: Metrics) -> dict[str, Fact]:
    """Return the figures of a run by their metrics, as far as they were measured."""
    best_of = [f"best_of/{n}/{what}" for n in catalog.best_of_counts(metrics) for what in _BEST_OF]
    benchmark = [name for name in metrics if name.startswith("benchmark/")]
    benchmark = [n for n in benchmark if not catalog.whole_key(n).endswith(("_low", "_high"))]
    values = {name: figure(metrics, name) for name in (*best_of, *benchmark, *_BESIDE)}
    return {n: _fact(metrics, n, value) for n, value in values.items() if value is not None}


def _fact(metrics: Metrics, name: str, value: float) -> Fact:
    about, before = quantity(name), figure(metrics, name.replace("val/", "val/baseline_", 1))
    shown = percent(value) if name.endswith("win_rate") else show(name, value)
    notes = []
    if before is not None and name.startswith("val/"):
        like = max(abs(before), abs(value))  # both with the digits that the larger one deserves
        shown = f"{about.show(before, like=like)} → {show(name, value, like=like)}"
        notes.append("baseline → now")
    if known := ends(metrics, name):
        notes.append(f"95 % interval {known}")
    judge = name.removeprefix("val/").removesuffix("_win_rate")
    if (asked := figure(metrics, _ASKED.get(name, ""))) is not None:
        notes.append(f"of {counted(asked, 'prompt')}")
    if name in (_SHORTER, _MATCHED, "val/human_reward_accuracy"):
        notes.append(f"of {pairs_of(metrics, name)}")
    if (pairs := figure(metrics, f"val/{judge}_num_pairs")) is not None:
        same = figure(metrics, f"val/{judge}_{_SAME}")
        tie = f" and equal responses ({percent(same)}), which tie" if same else ""
        told = f"of the {counted(pairs, 'pair')} with a verdict{tie}{_skipped(metrics, judge)}"
        notes.append(told)
    return Fact(about.label.removeprefix("held-out "), shown, ", ".join(filter(None, notes)))


def _skipped(metrics: Metrics, judge: str) -> str:
    """Return how many pairs have no verdict, to follow the rate of the others."""
    skipped, pairs = (figure(metrics, f"val/{judge}_{name}") for name in ("skipped", "num_pairs"))
    if not skipped or not pairs:
        return ""
    return f"; {skipped:,.0f} of {pairs + skipped:,.0f} skipped"


def pairs_of(metrics: Metrics, accuracy: str = "val/accuracy", kind: str = "") -> str:
    """Return of how many pairs, or KTO's rows, and of how many prompts an accuracy is."""
    noun = kind + ("row" if _UNPAIRED in metrics else "pair")
    of = ("num_pairs", "num_pair_prompts")
    pairs, prompts = (figure(metrics, accuracy.replace("accuracy", name)) for name in of)
    told = f"{noun}s" if pairs is None else counted(pairs, noun)
    return told if prompts in (None, pairs) else f"{told} of {counted(prompts or 0, 'prompt')}"


def prefers_longer(metrics: Metrics, phase: str = "val") -> str:
    """Return a warning of a reward model that ranks wrong where the shorter is preferred, or ""."""
    accuracy = f"{phase}/accuracy_chosen_shorter"
    shorter = figure(metrics, accuracy)
    if shorter is None or shorter >= 0.5:
        return ""
    right = f"{percent(shorter)} of {pairs_of(metrics, accuracy)}"
    return (
        f"Where the shorter response is preferred it ranks only {right} right: a policy that "
        "trains on it gets longer; use data.balance_length=true."
    )
