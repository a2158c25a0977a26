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


_MEDIA = (
    "samples/held_out",
    "samples/best",
    "samples/worst",
    "histograms/scores",
    "histograms/ratios",
    "histograms/advantages",
    "histograms/lengths",
)


def _on_policy(title: str, stage: str, *, critic: bool) -> tuple[Section, ...]:
    """Return the sections of PPO, or of a relative without a value model."""
    learning = ["clipfrac", "approx_kl", "entropy", "kl_coef"]
    norms = ["grad_norm"]
    if critic:
        learning[2:2] = ["explained_variance"]
        learning[-1:-1] = ["value_loss"]
        norms = ["policy_grad_norm", "value_grad_norm"]
    return (
        Section(
            f"{title}: what the policy does",
            stage,
            _lines(
                "rollout/score",
                "rollout/kl_per_token",
                "rollout/response_length",
                "rollout/eos_fraction",
                "rollout/distinct_2",
                "rollout/score_std",
                *(() if critic else ("rollout/informative_groups",)),
            ),
        ),
        Section(
            f"{title}: how it learns",
            stage,
            (
                *_lines(*(f"{stage}/{name}" for name in learning)),
                Panel(tuple(f"{stage}/{name}" for name in norms)),
                *_lines(f"{stage}/skipped_steps", f"{stage}/learning_rate"),
            ),
        ),
        Section(
            f"{title}: distributions and samples",
            stage,
            tuple(Panel((key,), "media") for key in _MEDIA),
        ),
        Section(
            f"{title}: time",
            stage,
            (
                Panel(("time/generate", "time/score", "time/update")),
                *_lines("throughput/tokens_per_second"),
            ),
        ),
    )


PPO_SECTIONS = _on_policy("PPO", "ppo", critic=True)
SECTIONS = (
    *PPO_SECTIONS,
    *_on_policy("GRPO", "grpo", critic=False),
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
        "DPO",
        "dpo",
        (
            Panel(("dpo/loss", "val/loss")),
            Panel(("dpo/accuracy", "val/accuracy")),
            Panel(("dpo/chosen_reward", "dpo/rejected_reward")),
            *_lines("dpo/chosen_logprob", "dpo/margin", "dpo/grad_norm"),
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
