"""The verdict on a run in plain words: for the last screen and the top of the report."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace

from rlhf_lightning.runs.metric_catalog import (
    best_of_counts,
    bound_keys,
    capitalized,
    duration,
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
    interval,
    unmeasured,
)
from rlhf_lightning.runs.summary import Summary

# Compared with the policy before: key, label, unit.
_CHANGES = (
    ("score", "score", ""),
    ("gold", "gold reward", ""),
    ("exact_match", "exact matches", "share"),
    ("first_word_match", "right first words", "share"),
    ("solved", "right numbers", "share"),
    ("answered", "answers with a number", "share"),
    ("response_length", "response length", "tokens"),
    ("eos_fraction", "ended by themselves", "share"),
    ("distinct_2", "distinct bigrams", "share"),
    ("refusal_rate", "harmful prompts refused", "share"),
    ("over_refusal_rate", "harmless look-alikes refused", "share"),
)


def _changes(metrics: Metrics, rival: str) -> list[Fact]:
    """Return the figures of the policy and of the one it started from."""
    return [
        _change(label, value, figure(metrics, f"val/baseline_{key}"), rival, unit)
        for key, label, unit in _CHANGES
        if (value := figure(metrics, f"val/{key}")) is not None
    ]


def _change(label: str, value: float, before: float | None, rival: str, unit: str) -> Fact:
    """Return a figure before and after."""
    like = max(abs(before or 0.0), abs(value))  # both with the digits that the larger one deserves

    def shown(x: float) -> str:
        return percent(x) if unit == "share" else number(x, like=like)

    plain = "" if unit == "share" else unit
    if before is None:
        return Fact(label, shown(value), plain)
    note = f"{rival} → now" + (f", {plain}" if plain else "")
    return Fact(label, f"{shown(before)} → {shown(value)}", note)


def _win_rate_fact(metrics: Metrics, judge: str, label: str) -> list[Fact]:
    """Return the win rate by a judge with the pairs that it is of, none where it was not asked."""
    name = f"val/{judge}_win_rate"
    rate, skipped = figure(metrics, name), figure(metrics, f"val/{judge}_skipped")
    pairs = figure(metrics, f"val/{judge}_num_pairs")
    of = "" if pairs is None else f"of the {pairs:.0f} pairs with a verdict"
    note = ", ".join(filter(None, (interval(metrics, name).strip(" ()"), of)))
    note += _skipped(metrics, judge)
    if rate is None:
        return [Fact(f"skipped by {label}", f"{skipped:.0f}", "all pairs")] if skipped else []
    return [Fact(f"win rate by {label}", percent(rate), note)]


def _skipped(metrics: Metrics, judge: str) -> str:
    """Return how many pairs have no verdict, to stand behind the rate of the others."""
    skipped, pairs = (figure(metrics, f"val/{judge}_{name}") for name in ("skipped", "num_pairs"))
    return f"; {skipped:.0f} of {pairs + skipped:.0f} were skipped" if skipped and pairs else ""


SPREAD = "rollout/score_std_max"


TRAINED_ON = "the reward it was trained on"


def _compared(metrics: Metrics, rival: str, name: str, by: str = TRAINED_ON) -> Verdict:
    """Return the verdict by the judge that counts most, of those that were asked."""
    facts = _changes(metrics, rival)
    kl = figure(metrics, "val/kl_per_token")
    if kl is not None:
        facts.insert(1, Fact(f"KL from {rival}", number(kl), "nats a token"))
    if figure(metrics, SPREAD) == 0:
        facts += _win_rate_fact(metrics, "gold", "gold") + _win_rate_fact(metrics, "score", "score")
        sentence = (
            "The score did not vary: in every rollout all responses had the same one, so there was "
            "nothing to learn, and a win rate says nothing of this reward."
        )
        return Verdict("bad", sentence=sentence, facts=tuple(facts))
    judge = _first_judge(metrics)
    if judge == "score":
        return _score_win_rate(metrics, rival, name, facts, by)
    if judge:
        return _win_rate(metrics, judge, rival, name, facts)
    score, before = figure(metrics, "val/score"), figure(metrics, "val/baseline_score")
    if score is None:
        skipped = figure(metrics, "val/judge_skipped") or 0.0
        if "val/score" in metrics or not (facts or skipped):
            return unmeasured(metrics, "val/score", "held-out evaluation", facts)
        sentence = "Nothing scored or judged the responses: the figures tell how they look."
        if skipped:
            sentence = f"The judge gave no verdict: it skipped all {skipped:.0f} pairs."
        return Verdict(sentence=sentence, facts=tuple(facts))
    if before is None:
        caption = "mean score on held-out prompts"
        return Verdict("neutral", number(score), caption, facts=tuple(facts))
    better = score > before
    sentence = f"The score {'rose' if better else 'did not rise'}; no gold reward says if rightly."
    gain = "+" * better + number(score - before)
    caption = f"change of the mean score, {rival} to {name}"
    return Verdict("neutral" if better else "bad", gain, caption, sentence, tuple(facts))


# Whose win rate is the headline, the one that counts most first.
JUDGES = {"gold": "the gold reward", "human": "people", "judge": "the judge", "score": "score"}


def _first_judge(metrics: Metrics) -> str:
    """Return the judge that counts most of those with a win rate, "" where none has one."""
    return next((by for by in JUDGES if figure(metrics, f"val/{by}_win_rate") is not None), "")


def _win_rate(metrics: Metrics, judge: str, rival: str, name: str, facts: list[Fact]) -> Verdict:
    """Return the verdict by a judge that training did not see."""
    better, worse = (
        f"{capitalized(name)} answers {word} than {rival}, by {JUDGES[judge]}."
        for word in ("better", "worse")
    )
    undecided = (
        f"Undecided: the interval includes 50 %, so no difference between {name} and {rival} is "
        "shown."
    )
    caption = f"of comparisons won against {rival}{_skipped(metrics, judge)}"
    sentences = (better, worse, undecided)
    return by_interval(metrics, f"val/{judge}_win_rate", 0.5, caption, sentences, facts)


def _score_win_rate(metrics: Metrics, rival: str, name: str, facts: list[Fact], by: str) -> Verdict:
    if figure(metrics, "val/score_tie_rate") == 1:
        sentence = (
            "No win rate: on every held-out prompt the score of both responses is the same, so it "
            "tells nothing apart."
        )
        return Verdict("bad", sentence=sentence, facts=tuple(facts))
    who, by = capitalized(name), f"than {rival} by {by}"
    sentences = (
        f"{who} scores higher {by}; read the samples to see if rightly.",
        f"{who} scores lower {by}.",
        f"Undecided: {name} is not shown to score higher or lower {by}.",
    )
    # Never "good": that the trained reward rises is what over-optimisation looks like, too.
    caption = f"of comparisons won against {rival}"
    return by_interval(
        metrics, "val/score_win_rate", 0.5, caption, sentences, facts, best="neutral"
    )


def verdict(summary: Summary) -> Verdict:
    """Return the verdict on a run from what its summary says.

    It reads the fixed keys of `metrics` and, where they are there, the same ones of the policy it
    started from: `val/baseline_score`, `_response_length`, `_distinct_2` and `_loss`.
    """
    result = _BY_STAGE.get(summary.stage, _other)(summary.metrics)
    if (by := summary.about.get("compared by")) is not None:  # from Python, with any policy
        by = TRAINED_ON if by == summary.about.get("reward") else f"the reward “{by}”"
        compared = _compared(summary.metrics, "the baseline", "the policy", by)
        told = {fact.label.partition(" from ")[0] for fact in compared.facts}
        own = (fact for fact in result.facts if fact.label.partition(" from ")[0] not in told)
        result = replace(compared, facts=(*compared.facts, *own))
    if not summary.judged:
        result = Verdict(sentence="It runs, and nothing was judged.")
    facts = result.facts
    if "total" in summary.seconds:
        facts = (*facts, Fact("time", duration(summary.seconds["total"])))
    failed = [gate for gate in summary.gates if not gate.passed]
    tone: Tone = "bad" if failed else result.tone
    sentence = result.sentence
    if failed:
        names = ", ".join(gate.name for gate in failed)
        sentence = f"{sentence} Failed gates: {names}.".strip()
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


def _pipeline(metrics: Metrics) -> Verdict:
    """Return the verdict on the last stage; the figures of all are hundreds."""
    if "val/accuracy" in metrics and not _first_judge(
        metrics
    ):  # that of DPO is not what its policy is worth
        return _reward(metrics)
    return _compared(metrics, "its baseline", "the last policy")


def _benchmark(metrics: Metrics) -> Verdict:
    """Return the verdict on a benchmark: pairs, RewardBench 2 or tasks of lm-eval."""
    facts, changes = [], []
    for name in metrics:
        value = figure(metrics, name)
        if value is None or whole_key(name).endswith(("_low", "_high")):
            continue
        low, high = (figure(metrics, key) for key in bound_keys(name))
        note = "" if low is None or high is None else f"{percent(low)} to {percent(high)}"
        facts.append(Fact(quantity(name).label, show(name, value), note))
        if whole_key(name).endswith("_change"):
            changes.append((low or 0.0) > 0 or (high or 0.0) < 0)
    if changes:
        sentence = f"{sum(changes)} of {len(changes)} changes from the baseline are shown."
        return Verdict(sentence=sentence, facts=tuple(facts))
    if (score := figure(metrics, "benchmark/score")) is not None:
        caption = f"mean of {metrics['benchmark/num_subsets']:.0f} subsets of RewardBench 2"
        return Verdict("neutral", percent(score), caption, facts=tuple(facts))
    return _ranked(metrics, "benchmark", "of pairs ranked as labelled", facts)


def _evaluate(metrics: Metrics) -> Verdict:
    if any(name.startswith("benchmark/") for name in metrics):
        return _benchmark(metrics)
    plain = _compared(metrics, "the baseline", "the policy", "the score")
    result = _best_of(metrics, plain)
    headline = _first_judge(metrics) if result.caption == plain.caption else ""
    others = [
        fact
        for judge, label in (*JUDGES.items(), ("gold_reference", "gold, against references"))
        if judge != headline
        for fact in _win_rate_fact(metrics, judge, label)
    ]
    key = "val/human_reward_accuracy"
    if (rate := figure(metrics, key)) is not None:
        note = "of people's choices" + interval(metrics, key)
        others.append(Fact("reward model agrees with", percent(rate), note))
    return replace(result, facts=(*others, *result.facts))


def _best_of(metrics: Metrics, plain: Verdict) -> Verdict:
    """Return the verdict on the best of the most answers; `plain`, that on one, without gold."""
    key = "best_of/{}/gold_win_rate"
    counts = [n for n in best_of_counts(metrics) if figure(metrics, key.format(n)) is not None]
    if not counts:
        chosen = [
            Fact(f"best of {n}", number(score), "mean score, by the score that chose it")
            for n in best_of_counts(metrics)
            if (score := figure(metrics, f"best_of/{n}/score")) is not None
        ]
        return replace(plain, facts=(*chosen, *plain.facts))
    facts = [
        Fact(
            f"best of {n}",
            percent(figure(metrics, key.format(n)) or 0.0),
            f"wins by gold, {interval(metrics, key.format(n)).strip(' ()')}",
        )
        for n in counts[:-1]
    ]
    most = counts[-1]
    who = f"The best of {most} responses of the policy, by the score, is"
    sentences = (
        f"{who} better than the baseline's, by the gold reward.",
        f"{who} worse than the baseline's, by the gold reward: the score leads astray.",
        f"{who} not shown to be better or worse than the baseline's, by the gold reward.",
    )
    caption = f"of comparisons won against the baseline by the best of {most}"
    return by_interval(metrics, key.format(most), 0.5, caption, sentences, [*facts, *plain.facts])


def _sft(metrics: Metrics) -> Verdict:
    facts = _changes(metrics, "base")
    loss, before = figure(metrics, "val/loss"), figure(metrics, "val/baseline_loss")
    if loss is not None:
        known = None if before is None else _perplexity(before)
        facts[:0] = [
            _change("held-out loss", loss, before, "base", "nats a token"),
            _change("perplexity", _perplexity(loss), known, "base", ""),
        ]
    train = figure(metrics, "sft/loss")
    if train is not None:
        facts.insert(min(2, len(facts)), Fact("training loss", number(train), "nats a token"))
    if figure(metrics, "val/gold_win_rate") is not None:
        return _win_rate(metrics, "gold", "base", "SFT", facts)
    if loss is None:
        return unmeasured(metrics, "val/loss", "held-out loss", facts)
    choices = number(_perplexity(loss))
    sentence = f"It chooses, on average, among {choices} equally likely tokens"
    if before is not None:
        sentence += f" ({number(_perplexity(before))} before training)"
    caption = "nats a token, loss on held-out responses"
    return Verdict("neutral", number(loss), caption, f"{sentence}.", tuple(facts))


def _dpo(metrics: Metrics) -> Verdict:
    """Return the verdict by the comparison with SFT; without one, by the held-out pairs."""
    name = "val/accuracy"
    unpaired = "val/kl" in metrics  # KTO's rows are single responses
    what = "rows on their label's side" if unpaired else "pairs ranked as labelled"
    known = "giving all the more frequent label" if unpaired else "chance"
    pairs = []
    if (accuracy := figure(metrics, name)) is not None:
        note = "by the policy's own rewards" + interval(metrics, name)
        pairs.append(Fact(f"held-out {what}", percent(accuracy), note))
    if (chosen := figure(metrics, "val/chosen_reward")) is not None:
        good = "good" if unpaired else "preferred"
        note = f"below 0: {good} responses have become less likely"
        pairs.append(Fact(f"reward of {good} responses", number(chosen), note))
    compared = _compared(metrics, "SFT", "KTO" if unpaired else "DPO", "the score")
    if compared.number or not pairs:
        return replace(compared, facts=(*compared.facts, *pairs))
    sentences = (
        f"It ranks held-out responses better than {known}; no judge compares its responses.",
        f"It ranks held-out responses worse than {known}.",
        f"Undecided: it is not shown to rank held-out responses better than {known}.",
    )
    facts = [*compared.facts, *pairs[1:]]
    rival = figure(metrics, "val/majority_accuracy") or 0.5
    return by_interval(
        metrics, name, rival, f"of held-out {what}", sentences, facts, best="neutral"
    )


def _perplexity(loss: float) -> float:
    return math.exp(min(loss, 50.0))


def _reward(metrics: Metrics) -> Verdict:
    matched, shorter = "val/accuracy_length_matched", "val/accuracy_chosen_shorter"
    rows = (
        ("val/label_ceiling", "ceiling set by the labels", "the best that is possible"),
        ("val/longer_wins_accuracy", "“the longer one wins”", "what length alone reaches"),
        (
            matched,
            "accuracy on pairs of one length",
            "lengths within 10 %" + interval(metrics, matched),
        ),
        (shorter, "accuracy where the shorter is preferred", _of_pairs(metrics, shorter)),
        ("val/calibration_error", "calibration error", ""),
        ("val/margin", "margin", ""),
        ("val/loss", "loss", ""),
    )
    facts = [
        Fact(label, show(name, value), note)
        for name, label, note in rows
        if (value := figure(metrics, name)) is not None
    ]
    if figure(metrics, "val/accuracy") is None:
        return unmeasured(metrics, "val/accuracy", "held-out accuracy", facts)
    return _ranked(metrics, "val", "of held-out pairs ranked as labelled", facts)


def _ranked(metrics: Metrics, phase: str, caption: str, facts: list[Fact]) -> Verdict:
    """Return the verdict on a reward model by the pairs that it ranks as labelled."""
    longer = figure(metrics, f"{phase}/longer_wins_accuracy") or 0.0
    known = "length alone" if longer > 0.5 else "chance"
    sentences = (
        f"It ranks responses better than {known} does.",
        f"It ranks responses worse than {known} does.",
        f"Undecided: it is not shown to rank responses better than {known} does.",
    )
    result = by_interval(metrics, f"{phase}/accuracy", max(0.5, longer), caption, sentences, facts)
    warning = prefers_longer(metrics, phase)
    return replace(result, sentence=f"{result.sentence} {warning}".strip())


def _of_pairs(metrics: Metrics, accuracy: str) -> str:
    pairs = figure(metrics, accuracy.replace("accuracy", "num_pairs"))
    return "" if pairs is None else f"of {pairs:.0f} pairs"


def prefers_longer(metrics: Metrics, phase: str = "val") -> str:
    """Return a warning of a reward model that ranks wrong where the shorter is preferred, or ""."""
    accuracy = f"{phase}/accuracy_chosen_shorter"
    shorter = figure(metrics, accuracy)
    if shorter is None or shorter >= 0.5:
        return ""
    right = f"{percent(shorter)} {_of_pairs(metrics, accuracy)}".strip()
    return (
        f"Where the shorter response is preferred it ranks only {right} right, below one half: a "
        "policy that trains on it gets longer. data.balance_length=true trains on as many pairs of "
        "both kinds."
    )


def _collect(metrics: Metrics) -> Verdict:
    """Return the verdict on collected records: how many there are, and how far to trust them."""
    rows = (
        ("val/label_ceiling", "ceiling set by the labels", "of held-out accuracy", percent),
        ("collect/validation_records", "held-out pairs", "never trained on", _plain),
        ("collect/usable_candidates", "usable responses", "of {num_candidates}", _plain),
        ("collect/automatic_share", "pairs labelled without people", "", percent),
        ("collect/raw_agreement", "two labels of people agree", "on held-out pairs", percent),
        ("collect/hours", "work of people", "hours; {hours_before} if they labelled all", _plain),
        (
            "collect/judge_unreadable",
            "unreadable replies",
            "of {judge_replies} of the judge",
            _plain,
        ),
        ("collect/score", "score of a usable response", "", _plain),
        ("collect/gold", "gold of a usable response", "", _plain),
    )
    known: dict[str, str] = defaultdict(lambda: "?")
    known |= {name.partition("/")[2]: _plain(value or 0.0) for name, value in metrics.items()}
    facts = [
        Fact(label, shown(value), note.format_map(known))
        for name, label, note, shown in rows
        if (value := figure(metrics, name)) is not None
    ]
    records = figure(metrics, "collect/train_records")
    if records is None:
        return unmeasured(metrics, "collect/train_records", "record", facts)
    best, gold = figure(metrics, "collect/score_best"), figure(metrics, "collect/gold_best")
    if best is not None:
        told = f" and {number(gold)} by gold" if gold is not None else ""
        sentence = f"The chosen responses score {number(best)} on average{told}."
        return Verdict("neutral", _plain(records), "demonstrations", sentence, tuple(facts))
    right = figure(metrics, "collect/gold_train")
    sentence = "Nothing here says whether the labels are right: read some of them."
    if right is not None:
        sentence = f"The gold reward agrees with {percent(right)} of these labels."
    caption = (
        f"pairs to train on, of {known['num_pairs']} that were labelled; the others are held out "
        "or show no preference"
    )
    return Verdict("neutral", _plain(records), caption, sentence, tuple(facts))


def _plain(value: float) -> str:
    return f"{value:,.0f}" if value.is_integer() else number(value)


def _other(metrics: Metrics) -> Verdict:
    facts = [Fact(name, show(name, value)) for name, value in metrics.items() if value is not None]
    return Verdict(facts=tuple(facts))


_BY_STAGE: Mapping[str, Callable[[Metrics], Verdict]] = {
    "ppo": lambda metrics: _compared(metrics, "SFT", "PPO"),
    "grpo": lambda metrics: _compared(metrics, "SFT", "GRPO"),
    "dpo": _dpo,
    "reward": _reward,
    "sft": _sft,
    "base": _sft,
    "evaluate": _evaluate,
    "collect": _collect,
    "pipeline": _pipeline,
}
