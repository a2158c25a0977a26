"""The choice of a setting from the runs of a comparison."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlhf_lightning.reports.several import COST, Run, with_effect
from rlhf_lightning.runs.folder import ITERATION
from rlhf_lightning.runs.metric_catalog import QUANTITIES
from rlhf_lightning.runs.outcome import interval

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


# Settings that decide what is measured: between runs that differ in them nothing is chosen.
_DATA = ("dataset", "data.source", "data.path", "data.also", "data.max_validation_rows")
_SCORES = (
    "scorer",
    "artifacts.reward",
    "artifacts.sft",  # the policy that is to be beaten
    "model.source",
    "model.from_scratch",
    "evaluation.num_prompts",
    "evaluation.answers_per_prompt",
    "evaluation.temperature",
    "evaluation.max_new_tokens",
)
_WITHOUT_EFFECT = ("dataset.num_iterations", "dataset.gold", "scorer.micro_batch_size")

_Setting = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Choice:
    """The outcome of a comparison of settings.

    Args:
        run: the best one, or of those that cannot be told from it the one nearest to the SFT
            policy, where KL is known of all; None where none can be named.
        reason: a sentence or two.
        caption: how sure that is, `TAKE` or `AHEAD`; "" where it is not shown to be better.
    """

    run: Run | None
    reason: str
    caption: str = ""


def choose(runs: Sequence[Run]) -> Choice:
    """Return which setting is ahead, and whether the runs show more than that.

    Runs that did not end, whose KL is outside of the healthy band, or whose score never varied are
    not compared, and none of a setting that has such a run is named as ahead. A setting is ahead if
    the 95 % interval of its run lies above those of all others. It is one to take if, besides, each
    setting was run with two seeds at least and every run of it is better than every other; of a
    loss, which has no interval, if its seeds are. Runs that are measured by different scores or
    data have no best one.
    """
    stages = {run.summary.stage for run in runs}
    if len(stages) != 1:
        return Choice(None, "The runs are of different stages, so none is better than another.")
    objective = OBJECTIVES.get(next(iter(stages)))
    if objective is None:
        return Choice(None, "Nothing is measured that a setting could be chosen by.")
    name, more = objective
    compared = [run for run in runs if not _why_left_out(run, name)]
    if not compared:
        return Choice(None, f"Nothing to recommend: {_left_out(runs, name)}.")
    if differing := _measured_by(compared, name):
        names = ", ".join(differing[:3]) + (" and others" if len(differing) > 3 else "")
        told = f"The runs are measured by different scores or data ({names}), so none is better "
        return Choice(None, f"{told}than another.")
    best = max(compared, key=lambda r: _value(r, name) if more else -_value(r, name))
    equal = [best, *(r for r in compared if r is not best and not _apart(best, r, name))]
    lost = _left_out(_by_setting(runs)[_setting(best)], name)
    caption = "" if lost else _caption(best, equal, _by_setting(compared), name, more=more)
    chosen = best if caption == TAKE or not more else _nearest(best, equal)
    return Choice(chosen, _reason(best, chosen, equal, len(compared), name, caption, lost), caption)


def _why_left_out(run: Run, name: str) -> str:
    """Return why a run is not compared, "" if it is."""
    if run.summary.status != "completed":
        return "did not end"
    if run.metrics.get(name) is None:
        return f"did not measure {QUANTITIES[name].label}"
    if run.metrics.get(SPREAD) == 0:
        return "had a score that never varied"
    return "" if _in_band(run) else f"left the band of {QUANTITIES[COST].label}"


def _left_out(runs: Sequence[Run], name: str) -> str:
    """Return how many of the runs are not compared, by reason; "" if all are."""
    found = Counter(why for run in runs if (why := _why_left_out(run, name)))
    return " and ".join(f"{count} of {len(runs)} runs {why}" for why, count in found.items())


def _measured_by(runs: Sequence[Run], name: str) -> list[str]:
    """Return the settings in which the measurements of the runs differ."""
    heads = (*_DATA, *_SCORES) if name.endswith("win_rate") else _DATA
    return [
        key
        for key in dict.fromkeys(key for run in runs for key in run.settings)
        if key.startswith(heads)
        and not key.startswith(_WITHOUT_EFFECT)
        and len({run.settings.get(key) for run in runs}) > 1
    ]


def _nearest(best: Run, equal: Sequence[Run]) -> Run:
    """Return the run that is nearest to the SFT policy; the best one where a KL is not known."""
    if any(run.metrics.get(COST) is None for run in equal):
        return best
    return min(equal, key=lambda run: (_value(run, COST), run.label))


def _caption(
    best: Run,
    equal: Sequence[Run],
    by_setting: Mapping[_Setting, Sequence[Run]],
    name: str,
    *,
    more: bool,
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
    best: Run,
    chosen: Run,
    equal: Sequence[Run],
    number_of_runs: int,
    name: str,
    caption: str,
    lost: str,
) -> str:
    label = QUANTITIES[name].label
    if number_of_runs == 1:
        return f"One run can be compared, {best.label}, with a {label} of {_shown(best, name)}."
    if caption:
        return f"It has the best {label}, {_shown(best, name)}{interval(best.metrics, name)}."
    told = f"The best {label}, {_shown(best, name)}, is that of {best.label}. "
    if lost:
        told += f"Of its setting {lost}. "
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


def _by_setting(runs: Sequence[Run]) -> dict[_Setting, list[Run]]:
    found: dict[_Setting, list[Run]] = defaultdict(list)
    for run in runs:
        found[_setting(run)].append(run)
    return found


def _setting(run: Run) -> _Setting:
    return tuple((k, v) for k, v in sorted(with_effect(run.settings).items()) if k != "seed")


def _value(run: Run, name: str) -> float:
    value = run.metrics[name]
    assert value is not None
    return value


def _in_band(run: Run) -> bool:
    kl, band = run.metrics.get(COST), QUANTITIES[COST].healthy
    return kl is None or band is None or kl <= band[1]
