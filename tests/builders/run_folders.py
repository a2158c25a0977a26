"""Run folders with plausible content that no model has made."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_lightning.runs.folder import MetricsAppender, RunFolder, SamplesAppender
from rlhf_lightning.runs.summary import GateResult, Summary, write_summary

TITLES = {"sft": "Supervised fine-tuning", "reward": "Reward model", "ppo": "PPO"}
# Metrics of an iteration: at the start and at the end.
CURVES: dict[str, dict[str, tuple[float, float]]] = {
    "sft": {"sft/loss": (3.2, 0.62), "val/loss": (3.25, 0.67)},
    "reward": {
        "reward/loss": (0.69, 0.35),
        "reward/accuracy": (0.5, 0.88),
        "reward/margin": (0.0, 2.1),
        "val/accuracy": (0.5, 0.862),
        "val/accuracy_low": (0.47, 0.832),
        "val/accuracy_high": (0.53, 0.892),
    },
    "ppo": {
        "rollout/score": (-0.05, 1.45),
        "rollout/kl_per_token": (0.0, 0.25),
        "rollout/kl_per_response": (0.0, 4.3),
        "rollout/response_length": (14.2, 18.0),
        "ppo/policy_loss": (-0.02, -0.03),
        "ppo/value_loss": (0.44, 0.09),
        "ppo/entropy": (1.35, 0.85),
        "time/generate": (0.42, 0.47),
        "time/score": (0.07, 0.07),
        "time/update": (0.61, 0.67),
        "throughput/tokens_per_second": (2900, 2800),
    },
}
METRICS: dict[str, dict[str, float | None]] = {
    "sft": {"val/loss": 0.67, "val/baseline_loss": 2.31},
    "reward": {
        "val/accuracy": 0.861,
        "val/accuracy_low": 0.845,
        "val/accuracy_high": 0.876,
        "val/longer_wins_accuracy": 0.594,
        "val/label_ceiling": 0.923,
        "val/calibration_error": 0.031,
    },
    "ppo": {
        "val/gold_win_rate": 0.8125,
        "val/num_prompts": 400.0,
        "val/gold_win_rate_low": 0.7712,
        "val/gold_win_rate_high": 0.8478,
        "val/score": 1.41,
        "val/baseline_score": -0.02,
        "val/kl_per_token": 0.243,
        "val/response_length": 17.9,
        "val/baseline_response_length": 14.1,
        "val/distinct_2": 0.352,
        "val/baseline_distinct_2": 0.412,
    },
}
GATES = (
    GateResult("gold win rate", 0.8125, 0.75, True, "81.2 % is at least 75 %"),
    GateResult("KL per token", 0.243, 0.5, True, "0.24 nats is at most 0.5"),
    GateResult("distinct bigrams", 0.352, 0.36, False, "0.352 is below 0.36, so diversity fell"),
)
SAMPLES = [
    ("How do I cook rice?", "how-to", "I don't know.", "First rinse it. Then boil it. Last, rest."),
    ("How do I pick a lock?", "harmful", "First take a pin.", "I cannot help with that."),
]


def fake_ppo_run(path: Path, num_iterations: int = 60) -> RunFolder:
    folder = _fake_run(path, "ppo", num_iterations, gates=GATES)
    appender = SamplesAppender(folder.samples)
    for iteration in (1, num_iterations):
        samples: list[dict[str, Any]] = []
        for prompt, domain, before, after in SAMPLES:
            own = {"response": after if iteration > 1 else before, "score": 1.2, "length": 6}
            own |= {"prompt": prompt, "domain": domain, "kl": 0.2, "finished": True}
            baseline = {"response": before, "score": -0.31, "length": 4} if iteration > 1 else {}
            samples.append(own | {f"baseline_{name}": value for name, value in baseline.items()})
        appender.append(iteration, samples)
    return folder


def fake_reward_run(path: Path, num_iterations: int = 60) -> RunFolder:
    return _fake_run(path, "reward", num_iterations)


def fake_sft_run(path: Path, num_iterations: int = 60) -> RunFolder:
    return _fake_run(path, "sft", num_iterations)


def _fake_run(path: Path, stage: str, num_iterations: int, **of_summary: Any) -> RunFolder:
    folder = RunFolder(path).create()
    appender = MetricsAppender(folder.metrics)
    for i in range(1, num_iterations + 1):
        validated = i % max(num_iterations // 10, 1) == 0
        ends: Mapping[str, tuple[float, float]] = {
            k: v for k, v in CURVES[stage].items() if validated or not k.startswith("val/")
        }
        appender.append(i, {k: a + (b - a) * i / num_iterations for k, (a, b) in ends.items()})
    summary = Summary(
        stage,
        "completed",
        1,
        metrics=METRICS[stage],
        seconds={"total": 97.0},
        versions={"python": "3.11.7", "torch": "2.13.0"},
        git_commit="0f3c1d2e" * 5,
        config_hash="9b1f22c07d5e4a31",
        title=TITLES[stage],
        **of_summary,
    )
    write_summary(folder, summary)
    folder.config.parent.mkdir(exist_ok=True)
    folder.config.write_text("seed: 1\nmodule:\n  ppo:\n    kl_coef: 0.05\n")
    folder.config.with_name("overrides.yaml").write_text("- +experiment=ppo\n- seed=1\n")
    return folder
