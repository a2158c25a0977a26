"""The verdict on a run: the figure that counts most, its interval, and the gates."""

from __future__ import annotations

from dataclasses import replace

from rlhf_lightning.runs.metric_catalog import (
    best_of_counts,
    counted,
    duration,
    ends,
    number,
    percent,
    quantity,
    show,
    whole_key,
)
from rlhf_lightning.runs.outcome import (
    Fact,
    Metrics,
    Tone,
    Verdict,
    by_interval,
    figure,
    unless_few,
)
from rlhf_lightning.runs.summary import Summary

# Whose win rate is the headline, the one that counts most first.
JUDGES = {"gold": "the gold reward", "human": "people", "judge": "the judge", "score": "the score"}
SPREAD = "rollout/score_std_max"
TRAINED_ON = "the reward it was trained on"
TEACHER = "val/teacher_kl_per_token"
_OWN = "val/chosen_reward"  # a policy's own rewards rank the pairs
_UNPAIRED = "val/kl"  # KTO's rows are single responses
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


def verdict(summary: Summary) -> Verdict:
    """Return the verdict on a run from what its summary says.

    What was measured decides what is the headline: a win rate by the judge that counts most, else
    the pairs that are ranked as labelled, else the held-out loss, else the score.
    """
    result = Verdict(sentence="It runs, and nothing was judged.")
    if summary.judged:
        by = TRAINED_ON if SPREAD in summary.metrics else ""
        if (given := summary.about.get("compared by")) is not None:  # from Python, by any reward
            by = TRAINED_ON if given == summary.about.get("reward") else f"the reward “{given}”"
        result = _headline(summary.metrics, by)
    facts = result.facts
    if "total" in summary.seconds:
        facts = (*facts, Fact("time", duration(summary.seconds["total"])))
    tone, sentence = result.tone, result.sentence
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
    return Verdict(tone, result.number, result.caption, sentence.strip(), facts, result.tone)


def _headline(metrics: Metrics, by: str) -> Verdict:
    """Return the verdict by the strongest evidence there is; `by` names the score, if need be."""
    facts = _facts(metrics)
    if figure(metrics, SPREAD) == 0:
        sentence = "The score did not vary in any rollout, so there was nothing to learn."
        return Verdict("bad", sentence=sentence, facts=_but(facts))
    counts = [n for n in best_of_counts(metrics) if f"best_of/{n}/gold_win_rate" in facts]
    judge = next((judge for judge in JUDGES if f"val/{judge}_win_rate" in facts), None)
    phase = "val" if "val/accuracy" in facts else "benchmark"
    if counts:
        name, who = f"best_of/{counts[-1]}/gold_win_rate", f"The best of {counts[-1]} responses"
        result = _compared(metrics, name, f"{who} of the policy is", JUDGES["gold"], facts)
        return replace(result, caption=f"{result.caption}, by the best of {counts[-1]}")
    if figure(metrics, TEACHER) is not None and SPREAD not in metrics:  # no reward
        return _against_before(metrics, TEACHER, "nats a token, KL to the teacher", facts)
    if judge == "score" and figure(metrics, "val/score_tie_rate") == 1:
        sentence = "No win rate: on every held-out prompt both responses have the same score."
        return Verdict("bad", sentence=sentence, facts=_but(facts))
    if judge is not None:
        verb = "The policy scores" if judge == "score" else "The policy answers"
        told = by if judge == "score" else JUDGES[judge]
        result = _compared(metrics, f"val/{judge}_win_rate", verb, told, facts)
        return replace(result, caption=result.caption + _skipped(metrics, judge))
    if f"{phase}/accuracy" in facts:
        return _ranked(metrics, phase, facts)
    if "val/loss" in facts:
        return _against_before(metrics, "val/loss", "nats a token, loss on held-out rows", facts)
    if "val/score" in facts:
        return _against_before(metrics, "val/score", "mean score on held-out prompts", facts)
    if (score := figure(metrics, "benchmark/score")) is not None:
        caption = f"mean of {metrics['benchmark/num_subsets'] or 0:.0f} subsets of RewardBench 2"
        return Verdict("neutral", percent(score), caption, "", _but(facts))
    if records := figure(metrics, "collect/train_records"):
        sentence = "Read some of the records." if "collect/gold_train" not in facts else ""
        return Verdict("neutral", f"{records:,.0f}", "records to train on", sentence, _but(facts))
    return _without_a_headline(metrics, facts)


def _but(facts: dict[str, Fact], name: str = "") -> tuple[Fact, ...]:
    return tuple(fact for key, fact in facts.items() if key != name)


def _compared(metrics: Metrics, name: str, who: str, by: str, facts: dict[str, Fact]) -> Verdict:
    """Return the verdict by a win rate over the baseline."""
    of_score = name == "val/score_win_rate"
    above, below = ("higher", "lower") if of_score else ("better", "worse")
    than = f"than the baseline{f', by {by}' * bool(by)}"
    # The score is never "good": that it rises is what over-optimisation looks like, too.
    rightly = "; read the samples to see if rightly" * of_score
    sentences = (
        f"{who} {above} {than}{rightly}.",
        f"{who} {below} {than}.",
        f"Undecided: no difference is shown. {who} neither {above} nor {below} {than}.",
    )
    if figure(metrics, name.replace("win_rate", "tie_rate")) == 1:
        sentences = (*sentences[:2], "Every comparison is a tie: no difference is shown.")
    caption, best = "of comparisons with the baseline won", "neutral" if of_score else "good"
    return by_interval(metrics, name, 0.5, caption, sentences, list(_but(facts, name)), best)  # type: ignore[arg-type]


def _ranked(metrics: Metrics, phase: str, facts: dict[str, Fact]) -> Verdict:
    """Return the verdict by the pairs that are ranked as labelled, which a policy need not be."""
    rivals = {
        "the more frequent label": figure(metrics, f"{phase}/majority_accuracy") or 0.0,
        "chance": 0.5,
        "length alone": figure(metrics, f"{phase}/longer_wins_accuracy") or 0.0,
    }
    known = max(rivals, key=lambda name: rivals[name])
    sentences = (
        f"It ranks responses better than {known} does.",
        f"It ranks responses worse than {known} does.",
        f"Undecided: it is not shown to rank responses better than {known} does.",
    )
    own, name = _OWN in metrics, f"{phase}/accuracy"
    what = "rows on their label's side" if _UNPAIRED in metrics else "pairs ranked as labelled"
    caption = f"of {'held-out ' * (phase == 'val')}{what}"
    others, best = list(_but(facts, name)), "neutral" if own else "good"
    result = by_interval(metrics, name, rivals[known], caption, sentences, others, best)  # type: ignore[arg-type]
    warning = "No judge compares its responses." if own else prefers_longer(metrics, phase)
    return replace(result, sentence=f"{result.sentence} {warning}".strip())


def _against_before(metrics: Metrics, name: str, caption: str, facts: dict[str, Fact]) -> Verdict:
    """Return the verdict by a figure beside that of the baseline; only the score should rise."""
    value, before = figure(metrics, name) or 0.0, figure(metrics, name.replace("/", "/baseline_"))
    tone: Tone = "neutral"
    sentence = "No baseline was measured, so nothing says whether it got better."
    if before is not None:
        better = value > before if name == "val/score" else value < before
        better = better and number(value) != number(before)
        tone = ("good" if name == TEACHER else "neutral") if better else "bad"
        sentence = f"{'Better' if better else 'No better'} than before: it was {number(before)}."
    found = Verdict(tone, number(value), caption, sentence, _but(facts))
    return unless_few(found, metrics, name)


def _without_a_headline(metrics: Metrics, facts: dict[str, Fact]) -> Verdict:
    for name in ("val/accuracy", "val/loss", "val/score"):
        if name in metrics:
            return Verdict("bad", sentence=f"{name} is not a finite number.", facts=_but(facts))
    sentence = "Nothing scored or judged the responses." if facts else "No figure was recorded."
    if skipped := figure(metrics, "val/judge_skipped"):
        sentence = f"The judge gave no verdict: it skipped all {counted(skipped, 'pair')}."
    return Verdict(sentence=sentence, facts=_but(facts))


def _facts(metrics: Metrics) -> dict[str, Fact]:
    """Return the figures of a run by their metrics, as far as they were measured."""
    best_of = [f"best_of/{n}/{what}" for n in best_of_counts(metrics) for what in _BEST_OF]
    benchmark = [name for name in metrics if name.startswith("benchmark/")]
    benchmark = [name for name in benchmark if not whole_key(name).endswith(("_low", "_high"))]
    return {
        name: _fact(metrics, name, value)
        for name in (*best_of, *benchmark, *_BESIDE)
        if (value := figure(metrics, name)) is not None
    }


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
    if name == _SHORTER:
        notes.append(_of_pairs(metrics, name))
    if (pairs := figure(metrics, f"val/{judge}_num_pairs")) is not None:
        notes.append(f"of the {counted(pairs, 'pair')} with a verdict{_skipped(metrics, judge)}")
    return Fact(about.label.removeprefix("held-out "), shown, ", ".join(filter(None, notes)))


def _skipped(metrics: Metrics, judge: str) -> str:
    """Return how many pairs have no verdict, to follow the rate of the others."""
    skipped, pairs = (figure(metrics, f"val/{judge}_{name}") for name in ("skipped", "num_pairs"))
    if not skipped or not pairs:
        return ""
    return f"; {skipped:,.0f} of {pairs + skipped:,.0f} skipped"


def _of_pairs(metrics: Metrics, accuracy: str) -> str:
    pairs = figure(metrics, accuracy.replace("accuracy", "num_pairs"))
    return "" if pairs is None else f"of {counted(pairs, 'pair')}"


def prefers_longer(metrics: Metrics, phase: str = "val") -> str:
    """Return a warning of a reward model that ranks wrong where the shorter is preferred, or ""."""
    accuracy = f"{phase}/accuracy_chosen_shorter"
    shorter = figure(metrics, accuracy)
    if shorter is None or shorter >= 0.5:
        return ""
    right = f"{percent(shorter)} {_of_pairs(metrics, accuracy)}".strip()
    return (
        f"Where the shorter response is preferred it ranks only {right} right: a policy that "
        "trains on it gets longer; use data.balance_length=true."
    )
