"""The choice of a setting from the runs of a comparison."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from rlhf_lightning.reports.several import COST, Run, with_effect
from rlhf_lightning.runs.folder import ITERATION
from rlhf_lightning.runs.metric_catalog import QUANTITIES
from rlhf_lightning.runs.verdict import interval

# What a setting may be chosen by: never gold, which training must not see. True: more is better.
OBJECTIVES: dict[str, tuple[str, bool]] = {
    "ppo": ("val/score_win_rate", True),
    "grpo": ("val/score_win_rate", True),
    "reward": ("val/accuracy", True),
    "dpo": ("val/accuracy", True),
    "sft": ("val/loss", False),
    "base": ("val/loss", False),
}
SPREAD = "rollout/score_std_max"
TAKE = "the setting to take"
AHEAD = "ahead in these runs; with one seed a setting, not yet a setting to take"


_Settings = dict[tuple[tuple[str, str], ...], list[Run]]


@dataclass(frozen=True)
class Choice:
    """The outcome of a comparison of settings.

    Args:
        run: the best one, or of those that cannot be told from it the one nearest to the SFT
            policy; None where none can be named.
        reason: a sentence or two.
        caption: how sure that is, `TAKE` or `AHEAD`; "" where it is not shown to be better.
    """

    run: Run | None
    reason: str
    caption: str = ""


def choose(runs: Sequence[Run]) -> Choice:
    """Return which setting is ahead, and whether the runs show more than that.

    Runs that did not end, whose KL is outside of the healthy band, or whose score never varied are
    not looked at. A setting is ahead if the 95 % interval of its run lies above those of all
    others. It is one to take if, besides, each setting was run with two seeds at least and every
    run of it is better than every other; of a loss, which has no interval, if its seeds are.
    """
    stages = {run.summary.stage for run in runs}
    if len(stages) != 1:
        return Choice(None, "The runs are of different stages, so none is better than another.")
    objective = OBJECTIVES.get(next(iter(stages)))
    if objective is None:
        return Choice(None, "Nothing is measured that a setting could be chosen by.")
    name, more = objective
    completed = [r for r in runs if r.summary.status == "completed"]
    ended = [r for r in completed if r.metrics.get(name) is not None]
    varied = [r for r in ended if r.metrics.get(SPREAD) != 0]
    compared = [r for r in varied if _in_band(r)]
    if not compared:
        why = "has ended" if not ended else "had a score that varied"
        why = f"keeps {QUANTITIES[COST].label} in the band" if varied else why
        return Choice(None, f"No run {why}: nothing to recommend.")
    best = max(compared, key=lambda r: _value(r, name) if more else -_value(r, name))
    equal = [best, *(r for r in compared if r is not best and not _apart(best, r, name))]
    nearest = min(equal, key=lambda r: (r.metrics.get(COST) or 0.0, r.label))
    chosen = nearest if more else best
    by_setting: _Settings = defaultdict(list)
    for run in compared:
        by_setting[_setting(run)].append(run)
    caption = _caption(best, equal, by_setting, name, more=more)
    if caption == TAKE:
        chosen = best
    return Choice(chosen, _reason(best, chosen, equal, len(compared), name, caption), caption)


def _caption(
    best: Run, equal: Sequence[Run], by_setting: _Settings, name: str, *, more: bool
) -> str:
    own = by_setting[_setting(best)]
    others = [run for runs in by_setting.values() if runs is not own for run in runs]
    if not others:
        return ""
    apart = all(run in own for run in equal)
    if min(len(runs) for runs in by_setting.values()) > 1:
        ours, theirs = ([_value(run, name) for run in runs] for runs in (own, others))
        beats_all = min(ours) > max(theirs) if more else max(ours) < min(theirs)
        # A loss has no interval: there the seeds alone decide.
        return TAKE if beats_all and (apart or not _has_interval(best, name)) else ""
    return AHEAD if apart else ""


def _reason(
    best: Run, chosen: Run, equal: Sequence[Run], number_of_runs: int, name: str, caption: str
) -> str:
    label = QUANTITIES[name].label
    if number_of_runs == 1:
        return f"One run can be compared, {best.label}, with a {label} of {_shown(best, name)}."
    if caption:
        return f"It has the best {label}, {_shown(best, name)}{interval(best.metrics, name)}."
    told = f"The best {label}, {_shown(best, name)}, is that of {best.label}. "
    others = [run for run in equal if run is not best]
    if others:
        names = ", ".join(f"{run.label} ({_shown(run, name)})" for run in others[:6])
        names += " and others" if len(others) > 6 else ""
        told += f"It cannot be told from that of {names}. "
    if chosen is not best:
        told += f"Of these {chosen.label} stays nearest to the SFT policy. "
    seeds = {run.settings.get("seed") for run in equal}
    few = "One seed a setting" if len(seeds) == 1 else "Seeds"
    length = max((int(run.rows[-1][ITERATION]) for run in equal if run.rows), default=0)
    told += f"{few} and {length} iterations" if length else few
    return f"{told}: more seeds or longer runs may order them otherwise."


def _shown(run: Run, name: str) -> str:
    return QUANTITIES[name].show(_value(run, name))


def _has_interval(run: Run, name: str) -> bool:
    return run.metrics.get(f"{name}_low") is not None


def _apart(best: Run, other: Run, name: str) -> bool:
    """Return whether two runs' intervals do not overlap; without intervals nothing is known."""
    low, high = best.metrics.get(f"{name}_low"), other.metrics.get(f"{name}_high")
    return low is not None and high is not None and high < low


def _setting(run: Run) -> tuple[tuple[str, str], ...]:
    return tuple((k, v) for k, v in sorted(with_effect(run.settings).items()) if k != "seed")


def _value(run: Run, name: str) -> float:
    value = run.metrics[name]
    assert value is not None
    return value


def _in_band(run: Run) -> bool:
    kl, band = run.metrics.get(COST), QUANTITIES[COST].healthy
    return kl is None or band is None or kl <= band[1]
