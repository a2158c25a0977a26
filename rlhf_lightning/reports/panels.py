"""The panels of a dashboard by stage, in the order in which one looks at a run."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_lightning.runs.metric_catalog import QUANTITIES, capitalized


@dataclass(frozen=True)
class Panel:
    """One panel.

    Args:
        metrics: what it draws over iterations; of a media panel its keys.
        kind: `line`, or `media` for tables and histograms.
    """

    metrics: tuple[str, ...]
    kind: str = "line"

    @property
    def title(self) -> str:
        """The metric in words, and where a healthy run keeps it."""
        about = QUANTITIES.get(self.metrics[0])
        if about is None:
            return self.metrics[0].rpartition("/")[2].replace("_", " ")
        label = capitalized(about.label)
        if about.healthy is None:
            return label
        low, high = map(about.show, about.healthy)
        return f"{label}, usually {low} to {high}"


@dataclass(frozen=True)
class Section:
    """Some panels under a heading.

    Args:
        name: the heading.
        stage: whose runs log these metrics: sft, reward or ppo.
        panels: in their order.
    """

    name: str
    stage: str
    panels: tuple[Panel, ...]


def _lines(*names: str) -> tuple[Panel, ...]:
    return tuple(Panel((name,)) for name in names)


PPO_SECTIONS = (
    Section(
        "PPO: what the policy does",
        "ppo",
        _lines(
            "rollout/score",
            "rollout/kl_per_token",
            "rollout/response_length",
            "rollout/eos_fraction",
            "rollout/distinct_2",
            "rollout/score_std",
        ),
    ),
    Section(
        "PPO: how it learns",
        "ppo",
        (
            *_lines(
                "ppo/clipfrac",
                "ppo/approx_kl",
                "ppo/explained_variance",
                "ppo/entropy",
                "ppo/value_loss",
                "ppo/kl_coef",
            ),
            Panel(("ppo/policy_grad_norm", "ppo/value_grad_norm")),
            *_lines("ppo/skipped_steps", "ppo/learning_rate"),
        ),
    ),
    Section(
        "PPO: distributions and samples",
        "ppo",
        tuple(
            Panel((key,), "media")
            for key in (
                "samples/held_out",
                "samples/best",
                "samples/worst",
                "histograms/scores",
                "histograms/ratios",
                "histograms/advantages",
                "histograms/lengths",
            )
        ),
    ),
    Section(
        "PPO: time",
        "ppo",
        (
            Panel(("time/generate", "time/score", "time/update")),
            *_lines("throughput/tokens_per_second"),
        ),
    ),
)
SECTIONS = (
    *PPO_SECTIONS,
    Section(
        "Reward model",
        "reward",
        (
            Panel(("reward/loss", "val/loss")),
            Panel(("reward/accuracy", "val/accuracy")),
            *_lines("val/calibration_error", "val/margin", "reward/grad_norm"),
        ),
    ),
    Section(
        "Supervised fine-tuning",
        "sft",
        (Panel(("sft/loss", "val/loss")), *_lines("sft/grad_norm", "sft/learning_rate")),
    ),
)

# Final values that a comparison of runs begins with.
OUTCOMES = (
    "val/score_win_rate",
    "val/kl_per_token",
    "val/score",
    "val/response_length",
    "val/distinct_2",
)
