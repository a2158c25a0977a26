"""The verdict on a policy that was held against another one."""

from __future__ import annotations

from rlhf_lightning.runs.quantities import number, percent
from rlhf_lightning.runs.verdict_parts import (
    Fact,
    Metrics,
    Tone,
    Verdict,
    against,
    changes,
    get,
    interval,
)

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
