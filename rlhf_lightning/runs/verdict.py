"""The verdict on a run in plain words: for the last screen and the top of the report."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace

from rlhf_lightning.runs.metric_catalog import (
    best_of_counts,
    bound_keys,
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
    interval,
    unless_few,
)
from rlhf_lightning.runs.summary import Summary

# Compared with the policy before.
_CHANGES = (
    *("score", "gold", "exact_match", "first_word_match", "solved", "answered"),
    *("response_length", "eos_fraction", "distinct_2", "refusal_rate", "over_refusal_rate"),
)
# Of how many prompts a share of refusals is.
_ASKED = {"refusal_rate": "val/num_harmful", "over_refusal_rate": "val/num_harmless"}
# Whose win rate is the headline, the one that counts most first.
JUDGES = {"gold": "the gold reward", "human": "people", "judge": "the judge", "score": "the score"}
SPREAD = "rollout/score_std_max"
TRAINED_ON = "the reward it was trained on"
TEACHER = "val/teacher_kl_per_token"
_OWN = "val/chosen_reward"  # a policy's own rewards rank the pairs
_UNPAIRED = "val/kl"  # KTO's rows are single responses


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
    failed = [gate for gate in summary.gates if not gate.passed]
    tone: Tone = "bad" if failed else result.tone
    sentence = result.sentence
    if failed:
        names = ", ".join(gate.name for gate in failed)
        sentence = f"{sentence} Failed gate{'s' * (len(failed) > 1)}: {names}.".strip()
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


def _headline(metrics: Metrics, by: str) -> Verdict:
    """Return the verdict by the strongest evidence there is; `by` names the score, if need be."""
    if any(name.startswith("collect/") for name in metrics):
        return _collect(metrics)
    if any(name.startswith("benchmark/") for name in metrics):
        return _benchmark(metrics)
    facts = [*_of_loss(metrics), *_changes(metrics), *_pairs(metrics)]
    if figure(metrics, SPREAD) == 0:
        wins = [fact for judge in ("gold", "score") for fact in _win_rate_fact(metrics, judge)]
        sentence = (
            "The score did not vary: in every rollout all responses had the same one, so there was "
            "nothing to learn, and a win rate says nothing of this reward."
        )
        return Verdict("bad", sentence=sentence, facts=(*wins, *facts))
    judge = next((j for j in JUDGES if figure(metrics, f"val/{j}_win_rate") is not None), "")
    if judge and _OWN in metrics and (rate := figure(metrics, "val/accuracy")) is not None:
        note = f"by the policy's own rewards{interval(metrics, 'val/accuracy')}"
        facts.append(Fact(f"held-out {_ranked_rows(metrics)}", percent(rate), note))
    if figure(metrics, TEACHER) is not None and SPREAD not in metrics:  # no reward
        judge, plain = "", _distilled(metrics, facts)
    elif judge == "score":
        plain = _score_win_rate(metrics, facts, by)
    elif judge:
        plain = _win_rate(metrics, judge, facts)
    else:
        plain = _without_a_judge(metrics, facts)
    result = _best_of(metrics, plain)
    said = judge if result.caption == plain.caption else ""
    others = [
        fact
        for other in (*JUDGES, "gold_reference")
        if other != said
        for fact in _win_rate_fact(metrics, other)
    ]
    key = "val/human_reward_accuracy"
    if (rate := figure(metrics, key)) is not None:
        note = "of people's choices" + interval(metrics, key)
        others.append(Fact("reward model agrees with", percent(rate), note))
    return replace(result, facts=(*others, *result.facts))


def _distilled(metrics: Metrics, facts: list[Fact]) -> Verdict:
    """Return the verdict on a policy that has learnt from a teacher alone."""
    kl, caption = figure(metrics, TEACHER) or 0.0, "nats a token, KL to the teacher"
    before = figure(metrics, "val/baseline_teacher_kl_per_token")
    if before is None:
        return Verdict("neutral", number(kl), caption, facts=tuple(facts))
    closer = kl < before and number(kl) != number(before)
    sentence = (
        f"The policy has come {'closer to' if closer else 'no closer to'} its teacher: the KL was "
        f"{number(before)} before. It says how alike they are, not how good."
    )
    found = Verdict("good" if closer else "bad", number(kl), caption, sentence, tuple(facts))
    return unless_few(found, metrics, TEACHER)


def _without_a_judge(metrics: Metrics, facts: list[Fact]) -> Verdict:
    """Return the verdict on a run whose responses were not compared."""
    if figure(metrics, "val/accuracy") is not None:
        return _ranked(metrics, "val", f"held-out {_ranked_rows(metrics)}", facts)
    loss, score = figure(metrics, "val/loss"), figure(metrics, "val/score")
    if loss is not None:
        before = figure(metrics, "val/baseline_loss")
        sentence = (
            f"It chooses, on average, among {number(_perplexity(loss))} equally likely tokens"
        )
        if before is not None:
            sentence += f" ({number(_perplexity(before))} before training)"
        caption = "nats a token, loss on held-out responses"
        return Verdict("neutral", number(loss), caption, f"{sentence}.", tuple(facts))
    if score is not None:
        before = figure(metrics, "val/baseline_score")
        if before is None:
            caption = "mean score on held-out prompts"
            sentence = "No baseline was scored, so nothing says whether it got better."
            found = Verdict("neutral", number(score), caption, sentence, tuple(facts))
            return unless_few(found, metrics, "val/score")
        rose = score > before
        sentence = (
            f"The score {'rose' if rose else 'did not rise'}; no gold reward says if rightly."
        )
        gain = "+" * rose + number(score - before)
        caption = "change of the mean score from that of the baseline"
        found = Verdict("neutral" if rose else "bad", gain, caption, sentence, tuple(facts))
        return unless_few(found, metrics, "val/score")
    for name in ("val/accuracy", "val/loss", "val/score"):
        if name in metrics:
            return Verdict("bad", sentence=f"{name} is not a finite number.", facts=tuple(facts))
    skipped = figure(metrics, "val/judge_skipped")
    sentence = "No held-out figure was recorded."
    if skipped:
        sentence = f"The judge gave no verdict: it skipped {_all_pairs(skipped)}."
    elif facts:
        sentence = "Nothing scored or judged the responses: the figures tell how they look."
    return Verdict(sentence=sentence, facts=tuple(facts))


def _ranked_rows(metrics: Metrics) -> str:
    return "rows on their label's side" if _UNPAIRED in metrics else "pairs ranked as labelled"


def _win_rate(metrics: Metrics, judge: str, facts: list[Fact]) -> Verdict:
    """Return the verdict by a judge that training did not see."""
    by = f"than the baseline, by {JUDGES[judge]}."
    undecided = "Undecided: the interval includes 50 %, so no difference from the baseline is shown"
    if figure(metrics, f"val/{judge}_tie_rate") == 1:
        undecided = "Every comparison is a tie, so no difference from the baseline is shown"
    sentences = (
        f"The policy answers better {by}",
        f"The policy answers worse {by}",
        f"{undecided} by {JUDGES[judge]}.",
    )
    caption = "of comparisons with the baseline won"
    result = by_interval(metrics, f"val/{judge}_win_rate", 0.5, caption, sentences, facts)
    return replace(result, caption=result.caption + _skipped(metrics, judge))


def _score_win_rate(metrics: Metrics, facts: list[Fact], by: str) -> Verdict:
    if figure(metrics, "val/score_tie_rate") == 1:
        sentence = (
            "No win rate: on every held-out prompt the score of both responses is the same, so it "
            "tells nothing apart."
        )
        return Verdict("bad", sentence=sentence, facts=tuple(facts))
    by = f"than the baseline{f' by {by}' if by else ''}"
    sentences = (
        f"The policy scores higher {by}; read the samples to see if rightly.",
        f"The policy scores lower {by}.",
        f"Undecided: the policy is not shown to score higher or lower {by}.",
    )
    caption = "of comparisons with the baseline won"
    # Never "good": that the trained reward rises is what over-optimisation looks like, too.
    return by_interval(
        metrics, "val/score_win_rate", 0.5, caption, sentences, facts, best="neutral"
    )


def _ranked(metrics: Metrics, phase: str, what: str, facts: list[Fact]) -> Verdict:
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
    own = _OWN in metrics
    result = by_interval(
        metrics,
        f"{phase}/accuracy",
        rivals[known],
        f"of {what}",
        sentences,
        facts,
        best="neutral" if own else "good",
    )
    warning = "No judge compares its responses." if own else prefers_longer(metrics, phase)
    return replace(result, sentence=f"{result.sentence} {warning}".strip())


def _best_of(metrics: Metrics, plain: Verdict) -> Verdict:
    """Return the verdict on the best of the most answers; `plain`, that on one, without gold."""
    right = [
        Fact(quantity(name).label, percent(rate), interval(metrics, name).strip(" ()"))
        for what in ("pass_at_k", "maj_at_k")
        for n in best_of_counts(metrics)
        if (rate := figure(metrics, name := f"best_of/{n}/{what}")) is not None
    ]
    plain = replace(plain, facts=(*right, *plain.facts))
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
    caption = f"of comparisons with the baseline won by the best of {most}"
    return by_interval(metrics, key.format(most), 0.5, caption, sentences, [*facts, *plain.facts])


def _benchmark(metrics: Metrics) -> Verdict:
    """Return the verdict on a benchmark: pairs, RewardBench 2 or tasks of lm-eval."""
    facts, changes = [], []
    for name in metrics:
        value = figure(metrics, name)
        if value is None or whole_key(name).endswith(("_low", "_high")):
            continue
        low, high = (figure(metrics, key) for key in bound_keys(name))
        facts.append(Fact(quantity(name).label, show(name, value), ends(metrics, name)))
        if whole_key(name).endswith("_change"):
            changes.append((low or 0.0) > 0 or (high or 0.0) < 0)
    if changes:
        shown = f"{sum(changes)} of {len(changes)}"
        sentence = f"Scores that are shown to differ from the baseline's: {shown}."
        return Verdict(sentence=sentence, facts=tuple(facts))
    if (score := figure(metrics, "benchmark/score")) is not None:
        subsets = counted(metrics["benchmark/num_subsets"] or 0, "subset")
        caption = f"mean of {subsets} of RewardBench 2"
        return Verdict("neutral", percent(score), caption, facts=tuple(facts))
    return _ranked(metrics, "benchmark", "pairs ranked as labelled", facts)


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
    if not records:
        return Verdict(sentence="No record was made.", facts=tuple(facts))
    best, gold = figure(metrics, "collect/score_best"), figure(metrics, "collect/gold_best")
    if best is not None:
        told = f" and {number(gold)} by gold" if gold is not None else ""
        sentence = f"The chosen responses score {number(best)} on average{told}."
        return Verdict(
            "neutral",
            _plain(records),
            f"demonstration{'s' * (records != 1)}",
            sentence,
            tuple(facts),
        )
    right = figure(metrics, "collect/gold_train")
    sentence = "Nothing here says whether the labels are right: read some of them."
    if right is not None:
        sentence = f"The gold reward agrees with {percent(right)} of these labels."
    caption = (
        f"pair{'s' * (records != 1)} to train on, of {known['num_pairs']} labelled; any other is "
        "held out or shows no preference"
    )
    return Verdict("neutral", _plain(records), caption, sentence, tuple(facts))


def _changes(metrics: Metrics) -> list[Fact]:
    """Return the figures of the policy and of the one it started from."""
    facts = []
    for name in _CHANGES:
        value, before = (figure(metrics, f"val/{part}{name}") for part in ("", "baseline_"))
        if value is not None:
            about = quantity(f"val/{name}")
            fact = _change(about.label.removeprefix("held-out "), value, before, about.unit)
            asked, known = figure(metrics, _ASKED.get(name, "")), ends(metrics, f"val/{name}")
            of = "" if asked is None else f"of {counted(asked, 'prompt')}"
            now = f"95 % interval now {known}" if known else ""
            notes = filter(None, (fact.note, "; ".join(filter(None, (of, now)))))
            facts.append(replace(fact, note=", ".join(notes)))
    if (kl := figure(metrics, "val/kl_per_token")) is not None:
        known = ends(metrics, "val/kl_per_token")
        note = "nats a token" + f", 95 % interval {known}" * bool(known)
        if (of_response := figure(metrics, "val/kl_per_response")) is not None:
            note += f"; {number(of_response)} a response"
        facts.insert(1, Fact("KL from the baseline", number(kl), note))
    return facts


def _change(label: str, value: float, before: float | None, unit: str) -> Fact:
    """Return a figure before and after."""
    like = max(abs(before or 0.0), abs(value))  # both with the digits that the larger one deserves
    now, was = (
        "" if x is None else percent(x) if unit == "share" else number(x, like=like)
        for x in (value, before)
    )
    plain = "" if unit == "share" else unit
    if before is None:
        return Fact(label, now, plain)
    return Fact(label, f"{was} → {now}", ", ".join(filter(None, ("baseline → now", plain))))


def _of_loss(metrics: Metrics) -> list[Fact]:
    """Return held-out loss, perplexity and training loss of rows that are single responses."""
    loss, before = figure(metrics, "val/loss"), figure(metrics, "val/baseline_loss")
    if loss is None or "val/accuracy" in metrics:
        return []
    known = None if before is None else _perplexity(before)
    facts = [
        _change("held-out loss", loss, before, "nats a token"),
        _change("perplexity", _perplexity(loss), known, ""),
    ]
    if (train := figure(metrics, "sft/loss")) is not None:
        facts.append(Fact("training loss", number(train), "nats a token"))
    return facts


def _perplexity(loss: float) -> float:
    return math.exp(min(loss, 50.0))


def _pairs(metrics: Metrics) -> list[Fact]:
    """Return the figures of held-out pairs other than the accuracy."""
    matched, shorter = "val/accuracy_length_matched", "val/accuracy_chosen_shorter"
    good = "good" if _UNPAIRED in metrics else "preferred"
    notes = {
        "val/label_ceiling": "the best that is possible",
        "val/longer_wins_accuracy": "what length alone reaches",
        matched: f"lengths within 10 %{interval(metrics, matched)}",
        shorter: _of_pairs(metrics, shorter),
        "val/calibration_error": "",
        "val/margin": "",
        "val/loss": "",
        _OWN: f"below 0: {good} responses have become less likely",
    }
    return [
        Fact(quantity(name).label.removeprefix("held-out "), show(name, value), note)
        for name, note in notes.items()
        if "val/accuracy" in metrics and (value := figure(metrics, name)) is not None
    ]


def _win_rate_fact(metrics: Metrics, judge: str) -> list[Fact]:
    """Return the win rate by a judge with the pairs that it is of, none where it was not asked."""
    label = JUDGES.get(judge, "gold, against references")
    name = f"val/{judge}_win_rate"
    rate, skipped = figure(metrics, name), figure(metrics, f"val/{judge}_skipped")
    pairs = figure(metrics, f"val/{judge}_num_pairs")
    of = "" if pairs is None else f"of the {counted(pairs, 'pair')} with a verdict"
    note = ", ".join(filter(None, (interval(metrics, name).strip(" ()"), of)))
    note += _skipped(metrics, judge)
    if rate is None:
        return [Fact(f"skipped by {label}", _all_pairs(skipped))] if skipped else []
    return [Fact(f"win rate by {label}", percent(rate), note)]


def _skipped(metrics: Metrics, judge: str) -> str:
    """Return how many pairs have no verdict, to follow the rate of the others."""
    skipped, pairs = (figure(metrics, f"val/{judge}_{name}") for name in ("skipped", "num_pairs"))
    if not skipped or not pairs:
        return ""
    return f"; {skipped:,.0f} of {pairs + skipped:,.0f} {'was' if skipped == 1 else 'were'} skipped"


def _all_pairs(count: float) -> str:
    return "the only pair" if count == 1 else f"all {counted(count, 'pair')}"


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
        f"Where the shorter response is preferred it ranks only {right} right, below one half: a "
        "policy that trains on it gets longer. data.balance_length=true trains on as many pairs of "
        "both kinds."
    )


def _plain(value: float) -> str:
    return f"{value:,.0f}" if value.is_integer() else number(value)
