"""The name of each metric in words, its unit, and its range in a healthy run."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True)
class Quantity:
    """The name and the range of one metric.

    Args:
        label: the name in plain words, a few.
        unit: "" for a plain number; "share" is shown in percent, and a difference of two shares,
            "points", in percentage points with its sign; a "count" is a whole number.
        healthy: the usual range of a run that goes well; None where there is none.
    """

    label: str
    unit: str = ""
    healthy: tuple[float, float] | None = None

    def show(self, value: float, *, like: float | None = None) -> str:
        """Return a value as text, without its unit unless that is percent; `like` as `number`."""
        if self.unit == "points":
            return f"{100 * value:+.1f}"
        if self.unit == "count":
            return f"{value:,.0f}"
        return percent(value) if self.unit == "share" else number(value, like=like)

    @property
    def heading(self) -> str:
        """The label with its unit, for a column of values that `show` returns."""
        named = self.unit and self.unit not in ("share", "count", "points")
        return f"{self.label}, {self.unit}" if named else self.label

    @property
    def usual(self) -> str:
        """The healthy range as text, e.g. `90 to 100 %`; "" where there is none."""
        if self.healthy is None:
            return ""
        low, high = self.healthy
        if self.unit == "share":
            return f"{100 * low:g} to {100 * high:g} %"
        return f"{low:g} to {high:g}"


QUANTITIES: dict[str, Quantity] = {
    "rollout/score": Quantity("score"),
    "rollout/score_std": Quantity("spread of the score"),
    "rollout/score_std_max": Quantity("widest spread of the score"),
    "rollout/clipped": Quantity("scores at the clip", "share"),
    "rollout/unscored": Quantity("responses without a score", "share"),
    "rollout/kl_per_token": Quantity("KL from SFT, per token", "nats", (0.05, 1.0)),
    "rollout/kl_per_response": Quantity("KL from SFT, per response", "nats"),
    "rollout/teacher_kl_per_token": Quantity("KL to the teacher, per token", "nats"),
    "rollout/response_length": Quantity("response length", "tokens"),
    "rollout/eos_fraction": Quantity("responses that end by themselves", "share", (0.9, 1.0)),
    "rollout/distinct_2": Quantity("distinct bigrams", "share"),
    "rollout/informative_groups": Quantity(
        "prompts whose responses differ in score", "share", (0.3, 1.0)
    ),
    "rollout/resampled_groups": Quantity(
        "prompts that took the place of others", "share", (0.0, 0.5)
    ),
    "rollout/resampling_rounds": Quantity("rounds of asking prompts in place of others"),
    "rollout/sampler_gap": Quantity("gap of sampler and policy, per token", "nats", (0.0, 0.05)),
    "rollout/sampler_non_finite": Quantity("log-probabilities of the sampler that are not finite"),
    "rollout/sampler_gap_max": Quantity("largest gap of sampler and policy", "nats"),
    "rollout/sampler_kl_k1": Quantity("KL of sampler and policy, k1", "nats", (-0.01, 0.01)),
    "rollout/sampler_kl_k3": Quantity("KL of sampler and policy, k3", "nats", (0.0, 0.01)),
    "rollout/effective_sample_size": Quantity("effective sample size", "share", (0.5, 1.0)),
    "rollout/truncated_tokens": Quantity("tokens above the cap", "share", (0.0, 0.05)),
    "rollout/masked_responses": Quantity("responses left out", "share", (0.0, 0.3)),
    "ppo/policy_loss": Quantity("policy loss"),
    "ppo/value_loss": Quantity("value loss"),
    "ppo/approx_kl": Quantity("KL of the update", "nats", (0.001, 0.05)),
    "ppo/clipfrac": Quantity("clipped ratios", "share", (0.0, 0.3)),
    "ppo/kept_fraction": Quantity("tokens inside the trust region", "share", (0.7, 1.0)),
    "ppo/mean_ratio": Quantity("mean ratio of policy and base", "", (0.9, 1.1)),
    "ppo/effective_sample_size": Quantity("effective sample size, tokens", "share", (0.5, 1.0)),
    "ppo/num_updates": Quantity("optimizer steps on a rollout"),
    "ppo/skipped_steps": Quantity("skipped optimizer steps", "", (0.0, 0.0)),
    "ppo/value_clipfrac": Quantity("clipped values", "share", (0.0, 0.3)),
    "ppo/explained_variance": Quantity("explained variance of the critic", "", (0.0, 1.0)),
    "ppo/entropy": Quantity("entropy of the policy", "nats"),
    "ppo/kl_coef": Quantity("KL coefficient"),
    "ppo/learning_rate": Quantity("learning rate"),
    "ppo/policy_grad_norm": Quantity("gradient norm, policy"),
    "ppo/value_grad_norm": Quantity("gradient norm, critic"),
    "grpo/policy_loss": Quantity("policy loss"),
    "grpo/approx_kl": Quantity("KL of the update", "nats", (0.001, 0.05)),
    "grpo/clipfrac": Quantity("clipped ratios", "share", (0.0, 0.3)),
    "grpo/kept_fraction": Quantity("tokens inside the trust region", "share", (0.7, 1.0)),
    "grpo/mean_ratio": Quantity("mean ratio of policy and base", "", (0.9, 1.1)),
    "grpo/effective_sample_size": Quantity("effective sample size, tokens", "share", (0.5, 1.0)),
    "grpo/num_updates": Quantity("optimizer steps on a rollout"),
    "grpo/skipped_steps": Quantity("skipped optimizer steps", "", (0.0, 0.0)),
    "grpo/entropy": Quantity("entropy of the policy", "nats"),
    "grpo/kl_coef": Quantity("KL coefficient"),
    "grpo/learning_rate": Quantity("learning rate"),
    "grpo/grad_norm": Quantity("gradient norm"),
    "distillation/divergence": Quantity("divergence from the teacher, per token", "nats"),
    "sft/loss": Quantity("training loss", "nats"),
    "sft/learning_rate": Quantity("learning rate"),
    "sft/grad_norm": Quantity("gradient norm"),
    "sft/skipped_steps": Quantity("skipped optimizer steps", "", (0.0, 0.0)),
    "reward/loss": Quantity("training loss", "nats", (0.0, 0.69)),
    "reward/accuracy": Quantity("training accuracy", "share", (0.5, 1.0)),
    "reward/margin": Quantity("training margin"),
    "reward/learning_rate": Quantity("learning rate"),
    "reward/grad_norm": Quantity("gradient norm"),
    "reward/skipped_steps": Quantity("skipped optimizer steps", "", (0.0, 0.0)),
    "reward/sample_mean": Quantity("mean score before normalisation"),
    "reward/sample_std": Quantity("spread of the score before normalisation"),
    "dpo/loss": Quantity("training loss", "nats"),
    "dpo/accuracy": Quantity("training accuracy", "share", (0.5, 1.0)),
    "dpo/chosen_reward": Quantity("reward of preferred responses", "", (-1.0, 5.0)),
    "dpo/rejected_reward": Quantity("reward of rejected responses"),
    "dpo/margin": Quantity("training margin"),
    "dpo/kl": Quantity("KL to the reference, of responses to other prompts", "nats"),
    "dpo/chosen_logprob": Quantity("log-probability of preferred responses", "nats"),
    "dpo/rejected_logprob": Quantity("log-probability of rejected responses", "nats"),
    "dpo/learning_rate": Quantity("learning rate"),
    "dpo/grad_norm": Quantity("gradient norm"),
    "dpo/skipped_steps": Quantity("skipped optimizer steps", "", (0.0, 0.0)),
    "val/kl": Quantity("held-out KL to the reference, of responses to other prompts", "nats"),
    "val/chosen_reward": Quantity("held-out reward of preferred responses", "", (-1.0, 5.0)),
    "val/rejected_reward": Quantity("held-out reward of rejected responses"),
    "val/chosen_logprob": Quantity("held-out log-probability of preferred responses", "nats"),
    "val/rejected_logprob": Quantity("held-out log-probability of rejected responses", "nats"),
    "val/loss": Quantity("held-out loss", "nats"),
    "val/accuracy": Quantity("held-out accuracy", "share", (0.6, 1.0)),
    "val/accuracy_ties_half": Quantity("held-out accuracy, ties one half", "share"),
    "val/accuracy_length_matched": Quantity("accuracy at equal length", "share", (0.5, 1.0)),
    "val/accuracy_chosen_shorter": Quantity("accuracy where the shorter is preferred", "share"),
    "val/accuracy_chosen_longer": Quantity("accuracy where the longer is preferred", "share"),
    "val/margin": Quantity("held-out margin"),
    "val/num_pairs": Quantity("held-out pairs"),
    "val/calibration_error": Quantity("calibration error", "share", (0.0, 0.1)),
    "val/majority_accuracy": Quantity("accuracy of the more frequent label", "share"),
    "val/longer_wins_accuracy": Quantity(
        "accuracy of choosing the longer one", "share", (0.5, 0.65)
    ),
    "data/contradicting_pairs": Quantity("pairs that another one contradicts"),
    "data/merged_boundaries": Quantity("rows where one token ends the prompt, starts the response"),
    "data/bad_records_skipped": Quantity("bad records skipped"),
    "val/label_ceiling": Quantity("ceiling set by the labels", "share"),
    "val/score": Quantity("held-out score"),
    "val/score_win_rate": Quantity("win rate by the score", "share"),
    "val/score_unscored": Quantity("prompts without a score on both sides", "share"),
    "val/kl_per_token": Quantity("held-out KL, per token", "nats", (0.05, 0.5)),
    "val/teacher_kl_per_token": Quantity("held-out KL to the teacher, per token", "nats"),
    "val/teacher_kl_share": Quantity("KL to the teacher that is left", "share", (0.0, 0.1)),
    "val/kl_per_response": Quantity("held-out KL, per response", "nats"),
    "val/response_length": Quantity("held-out response length", "tokens"),
    "val/eos_fraction": Quantity("held-out responses that end", "share", (0.9, 1.0)),
    "val/distinct_2": Quantity("held-out distinct bigrams", "share"),
    "val/num_prompts": Quantity("held-out prompts"),
    "val/num_harmful": Quantity("harmful prompts"),
    "val/num_harmless": Quantity("harmless look-alikes"),
    "val/distinct_1": Quantity("held-out distinct words", "share"),
    "val/distinct_3": Quantity("held-out distinct trigrams", "share"),
    "val/refusal_rate_change": Quantity("change of refusals", "points"),
    "val/over_refusal_rate_change": Quantity("change of needless refusals", "points"),
    "val/larger_model_accuracy": Quantity("accuracy of a larger model", "share"),
    "val/judge_win_rate": Quantity("win rate by the judge", "share"),
    "val/judge_skipped": Quantity("pairs that the judge skipped"),
    "val/judge_num_pairs": Quantity("pairs with a verdict of the judge"),
    "val/judge_identical_rate": Quantity("prompts with the same response twice", "share"),
    "val/judge_spelled": Quantity("responses that spell the judge's delimiters"),
    "val/human_skipped": Quantity("pairs that people skipped"),
    "val/human_win_rate": Quantity("win rate by people", "share", (0.5, 1.0)),
    "val/human_tie_rate": Quantity("ties by people", "share"),
    "val/human_identical_rate": Quantity("prompts with the same response twice", "share"),
    "val/human_agreement": Quantity("agreement of people", "share", (0.6, 1.0)),
    "val/human_num_pairs": Quantity("pairs that people compared"),
    "val/human_num_labels": Quantity("labels of people"),
    "val/human_reward_accuracy": Quantity("people's choices the score shares", "share"),
    "val/human_reward_calibration_error": Quantity("calibration on people's choices", "share"),
    "val/human_reward_num_pairs": Quantity("pairs of that calibration"),
    "val/human_reward_longer_wins_accuracy": Quantity("people prefer the longer one", "share"),
    "val/human_reward_prefers_longer": Quantity("the score prefers the longer one", "share"),
    "val/human_reward_length_bias": Quantity("length bias against people", "share", (-0.1, 0.1)),
    "val/gold": Quantity("gold reward"),
    "val/self_bleu": Quantity("held-out self-BLEU", "share"),
    "val/unique_fraction": Quantity("different held-out responses", "share"),
    "val/most_common_fraction": Quantity("share of the most common held-out response", "share"),
    "val/repetition": Quantity("repeated 4-grams inside held-out responses", "share"),
    "val/refusal_rate": Quantity("harmful prompts refused", "share"),
    "val/over_refusal_rate": Quantity("harmless look-alikes refused", "share"),
    "val/train_accuracy": Quantity("accuracy on training pairs, at the end", "share"),
    "val/gold_win_rate": Quantity("gold win rate", "share", (0.5, 1.0)),
    "val/exact_match": Quantity("responses that are the reference", "share"),
    "val/first_word_match": Quantity("responses that begin as the reference", "share"),
    "val/solved": Quantity("right numbers", "share"),
    "val/answered": Quantity("responses with a number", "share"),
    "doctor/warnings": Quantity("detectors that warn"),
    "doctor/alarms": Quantity("detectors that raise an alarm"),
    "doctor/quality": Quantity("quality by the doctor"),
    "doctor/sampler_error": Quantity("standard error of surprise less entropy", "nats"),
    "doctor/second_std": Quantity("spread of the second scorer"),
    "doctor/second_score": Quantity("second scorer"),
    "doctor/second_correlation": Quantity("score and second scorer, correlation"),
    "doctor/length_correlation": Quantity("score and length, correlation", "", (-0.5, 0.5)),
    "doctor/most_common": Quantity("most common response", "share", (0.0, 0.3)),
    "doctor/clipped": Quantity("scores at the clip", "share", (0.0, 0.25)),
    "doctor/sampler_bias": Quantity("surprise less entropy of samples", "nats", (-0.03, 0.03)),
    "doctor/refusal_rate": Quantity("harmful requests refused", "share"),
    "doctor/harmful_prompts": Quantity("harmful requests in the rollout"),
    "time/generate": Quantity("generating", "s"),
    "time/score": Quantity("scoring and old passes", "s"),
    "time/update": Quantity("updating", "s"),
    "time/evaluate": Quantity("evaluating", "s"),
    "time/validate": Quantity("validating", "s"),
    "throughput/tokens_per_second": Quantity("tokens a second"),
    "throughput/pairs_per_second": Quantity("pairs a second"),
}

PARTS = ("domain", "subset", "task")
# Names that a run makes up: parts of a score, of gold. `*` stands for the rest of a name. The
# metric of a domain or a subset starts with the name of the whole; see `part_key`.
FAMILIES = (
    "rollout/score/*",
    "val/num_pairs_*",
    "val/num_pairs/*",
    "val/gold/*",
    "val/baseline_*",
    "val/*_win_rate_length_controlled",
    "val/*_tie_rate",
    "doctor/domain_score/*",
    "best_of/*",
    "benchmark/*",
)
_BEST_OF = re.compile(r"best_of/(\d+)/(.+)")


def is_known(name: str) -> bool:
    """Return whether docs/metrics.md explains a metric of this name."""
    plain = whole_key(name)
    if plain != name and is_known(plain):
        return True
    plain = plain.removesuffix("_low").removesuffix("_high")
    return plain in QUANTITIES or any(
        fnmatchcase(one, family) for one in (name, plain) for family in FAMILIES
    )


def part_key(key: str, kind: str, name: str) -> str:
    """Return the metric's name for one part, such as a domain, of what `key` is measured on.

    The part's name comes last, behind a slash that no key has, so it cannot collide with another
    metric.

    Args:
        key: `phase/quantity`, with `_low` or `_high` for a bound of an interval.
        kind: the kind of part, one of `PARTS`.
        name: the part's name in the data.
    """
    if kind not in PARTS:
        raise ValueError(f"kind={kind!r} must be one of {', '.join(PARTS)}")
    return f"{key}/{kind}/{name}"


def whole_key(name: str) -> str:
    """Return the metric of the whole that `name` is a part of; `name` itself for others."""
    pieces = name.split("/", 3)
    return "/".join(pieces[:2]) if len(pieces) == 4 and pieces[2] in PARTS else name


def bound_keys(name: str) -> tuple[str, str]:
    """Return the names of the lower and the upper end of the interval of `name`."""
    whole = whole_key(name)
    low, high = (whole + end + name.removeprefix(whole) for end in ("_low", "_high"))
    return low, high


def best_of_counts(names: Iterable[str]) -> list[int]:
    """Return the n, by size, of which there are metrics `best_of/<n>/...`."""
    return sorted({int(match[1]) for name in names if (match := _BEST_OF.fullmatch(name))})


def bands() -> dict[str, tuple[float, float]]:
    """Return the range in which a healthy run keeps each metric that has one."""
    return {name: q.healthy for name, q in QUANTITIES.items() if q.healthy is not None}


def bands_table() -> str:
    """Return the bands as the Markdown table of docs/metrics.md."""
    lines = ["| metric | from | to |", "|---|---|---|"]
    for name, (low, high) in bands().items():
        lines.append(f"| `{name}` | {low:g} | {high:g} |")
    return "\n".join(lines)


def quantity(name: str) -> Quantity:
    """Return how to show `name`; an unknown metric is called by the last part of its name.

    That of a domain or a subset is shown as that of the whole, with its name behind.
    """
    whole = whole_key(name)
    if whole != name:
        about = quantity(whole)
        return Quantity(f"{about.label}: {name.split('/', 3)[3]}", about.unit, about.healthy)
    if name.startswith("benchmark/"):
        plain = name.removeprefix("benchmark/")
        if plain.startswith("num_"):
            return Quantity(plain.removeprefix("num_").replace("_", " "), "count")
        unit = "points" if plain.endswith("_change") else "share"
        return Quantity(plain.replace("_", " "), unit)
    if (plain := name.replace("val/baseline_", "val/")) != name and plain in QUANTITIES:
        about = QUANTITIES[plain]
        return Quantity(f"{about.label}, baseline", about.unit)
    best_of = _BEST_OF.fullmatch(name)
    if best_of is not None and best_of[2] in ("pass_at_k", "maj_at_k"):
        return Quantity(best_of[2].replace("_at_k", f"@{best_of[1]}"), "share")
    if best_of is not None:
        about = quantity(f"val/{best_of[2]}")
        return Quantity(f"{about.label}, best of {best_of[1]}", about.unit)
    known = QUANTITIES.get(name) or _OF_STEPS.get(step_quantity(name))
    return known or Quantity(name.rpartition("/")[2].replace("_", " "))


def step_quantity(name: str) -> str:
    """Return `clipfrac` of `ppo/clipfrac`, measured in optimizer steps; "" of other metrics."""
    phase, _, what = name.partition("/")
    return "" if phase in _OTHER_PHASES or "/" in what else what


_OTHER_PHASES = (
    *("rollout", "val", "data", "doctor", "time", "throughput"),
    *("benchmark", "best_of", "collect"),
)
# An objective of a user's measures under its own name what ours measure: it is shown alike.
_OF_STEPS = {
    what: about for name, about in reversed(QUANTITIES.items()) if (what := step_quantity(name))
}


def show(name: str, value: float, *, like: float | None = None) -> str:
    """Return the value as text with its unit, and as many digits as `like` would have."""
    about = quantity(name)
    unit = "" if about.unit in ("share", "count") else about.unit
    return f"{about.show(value, like=like)} {unit}".strip()


def number(value: float, *, like: float | None = None) -> str:
    """Return a number with about three digits that count, or as many as `like` would have."""
    size = abs(value if like is None else like)
    if value != value:
        return "not a number"
    if value == 0:
        return "0"
    if like is not None and size >= 100_000 > abs(value):
        return number(value)
    if size >= 100_000 or size < 0.001:
        return f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e+")
    digits = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 0.1 else 4
    return f"{value:.{digits}f}"


def capitalized(label: str) -> str:
    """Return a label as the beginning of a sentence; the rest of it as it is."""
    return label[:1].upper() + label[1:]


def counted(count: float, noun: str) -> str:
    """Return a number of things, e.g. `1 pair` or `2,000 pairs`."""
    return f"{count:,.0f} {noun}{'s' * (count != 1)}"


def percent(value: float) -> str:
    """Return a share as percent, e.g. `82.4 %`."""
    return f"{100 * value:.1f} %"


def ends(metrics: Mapping[str, float | None], name: str) -> str:
    """Return the interval, e.g. `79.7 to 86.2 %` or `0.19 to 0.22`; "" where none was measured."""
    low, high = (metrics.get(key) for key in bound_keys(name))
    if low is None or high is None or not math.isfinite(low) or not math.isfinite(high):
        return ""
    unit = quantity(name).unit
    if unit == "points":
        return f"{100 * low:+.1f} to {100 * high:+.1f} points"
    if unit != "share" and "_win_rate" not in name:
        like = max(abs(low), abs(high))
        return f"{number(low, like=like)} to {number(high, like=like)}"
    return f"{100 * low:.1f} to {percent(high)}"


def duration(seconds: float) -> str:
    """Return a duration with its units, e.g. `0.4 s`, `42 s`, `6 min 43 s` or `1 h 2 min`."""
    if seconds < 9.95:
        return f"{max(seconds, 0.0):.1f} s"
    whole = round(seconds)
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
