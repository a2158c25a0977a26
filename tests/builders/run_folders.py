"""Run folders with plausible content that no model has made."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

from rlhf_lightning.runs.folder import MetricsAppender, RunFolder, SamplesAppender
from rlhf_lightning.runs.summary import GateResult, Summary, write_summary

VERSIONS = {"python": "3.11.7", "torch": "2.13.0", "lightning": "2.6.6", "transformers": "5.23.0"}

SAMPLES = [
    ("How do I cook rice?", "how-to", "I don't know.", "First rinse it. Then boil it. Last, rest."),
    ("What is 3 plus 4?", "sums", "It is 8.", "3 plus 4 is 7."),
    ("List two fruits.", "lists", "apple", "One: apple. Two: pear."),
    ("How do I pick a lock?", "harmful", "First take a pin.", "I cannot help with that."),
]

PPO_METRICS: dict[str, float | None] = {
    "val/gold_win_rate": 0.8125,
    "val/gold_win_rate_low": 0.7712,
    "val/gold_win_rate_high": 0.8478,
    "val/score": 1.41,
    "val/baseline_score": -0.02,
    "val/kl_per_token": 0.243,
    "val/response_length": 17.9,
    "val/baseline_response_length": 14.1,
    "val/distinct_2": 0.352,
    "val/baseline_distinct_2": 0.412,
}


def fake_ppo_run(path: Path, num_iterations: int = 60) -> RunFolder:
    folder = RunFolder(path).create()
    noise = random.Random(1)
    appender = MetricsAppender(folder.metrics)
    for i in range(1, num_iterations + 1):
        t = i / num_iterations
        grown = 1 - math.exp(-3.2 * t)
        row = {
            "rollout/score": -0.05 + 1.5 * grown + noise.gauss(0, 0.07),
            "rollout/kl_per_token": 0.25 * grown + noise.gauss(0, 0.008) * grown,
            "rollout/kl_per_response": 4.3 * grown + noise.gauss(0, 0.1),
            "rollout/response_length": 14.2 + 3.8 * grown + noise.gauss(0, 0.35),
            "ppo/policy_loss": -0.02 - 0.01 * t + noise.gauss(0, 0.004),
            "ppo/value_loss": 0.35 * math.exp(-4 * t) + 0.09 + noise.gauss(0, 0.01),
            "ppo/entropy": 1.35 - 0.5 * grown + noise.gauss(0, 0.015),
            "time/generate": 0.42 + noise.random() * 0.05,
            "time/score": 0.07,
            "time/update": 0.61 + noise.random() * 0.06,
            "throughput/tokens_per_second": 2900 + noise.gauss(0, 80),
        }
        appender.append(i, row)
    _write_samples(folder, num_iterations, noise)
    gates = (
        GateResult("gold win rate", 0.8125, 0.75, True, "81.2 % is at least 75 %"),
        GateResult("KL per token", 0.243, 0.5, True, "0.24 nats is at most 0.5"),
        GateResult(
            "distinct bigrams", 0.352, 0.36, False, "0.352 is below 0.36, so diversity fell"
        ),
    )
    _finish(folder, "ppo", PPO_METRICS, gates=gates)
    return folder


def fake_reward_run(path: Path, num_iterations: int = 400) -> RunFolder:
    folder = RunFolder(path).create()
    noise = random.Random(2)
    appender = MetricsAppender(folder.metrics)
    for i in range(1, num_iterations + 1):
        grown = 1 - math.exp(-4 * i / num_iterations)
        row = {
            "reward/loss": 0.69 - 0.34 * grown + noise.gauss(0, 0.045),
            "reward/accuracy": min(1.0, 0.5 + 0.38 * grown + noise.gauss(0, 0.05)),
            "reward/margin": 2.1 * grown + noise.gauss(0, 0.2),
        }
        if i % (num_iterations // 10) == 0:
            row |= {
                "val/accuracy": 0.5 + 0.362 * grown,
                "val/accuracy_low": 0.47 + 0.362 * grown,
                "val/accuracy_high": 0.53 + 0.362 * grown,
            }
        appender.append(i, row)
    metrics = {
        "val/accuracy": 0.861,
        "val/accuracy_low": 0.845,
        "val/accuracy_high": 0.876,
        "val/longer_wins_accuracy": 0.594,
        "val/label_ceiling": 0.923,
        "val/calibration_error": 0.031,
    }
    _finish(folder, "reward", metrics)
    return folder


def fake_sft_run(path: Path, num_iterations: int = 300) -> RunFolder:
    folder = RunFolder(path).create()
    noise = random.Random(3)
    appender = MetricsAppender(folder.metrics)
    for i in range(1, num_iterations + 1):
        loss = 0.62 + 2.6 * math.exp(-7 * i / num_iterations)
        row = {
            "sft/loss": loss + noise.gauss(0, 0.04),
        }
        if i % (num_iterations // 6) == 0:
            row["val/loss"] = loss + 0.05
        appender.append(i, row)
    _finish(folder, "sft", {"val/loss": 0.67, "val/baseline_loss": 2.31})
    return folder


def _write_samples(folder: RunFolder, last: int, noise: random.Random) -> None:
    appender = SamplesAppender(folder.samples)
    for iteration in (1, last):
        samples: list[dict[str, Any]] = []
        for prompt, domain, before, after in SAMPLES:
            sample = {
                "prompt": prompt,
                "response": after if iteration > 1 else before,
                "score": round(noise.gauss(1.2 if iteration > 1 else 0, 0.8), 3),
                "kl": round(abs(noise.gauss(0.2, 0.1)), 3),
                "length": len(after.split()),
                "domain": domain,
                "finished": noise.random() > 0.1,
            }
            if iteration > 1:
                baseline = {"response": before, "score": -0.31, "length": len(before.split())}
                sample |= {f"baseline_{name}": value for name, value in baseline.items()}
            samples.append(sample)
        appender.append(iteration, samples)


TITLES = {"sft": "Supervised fine-tuning", "reward": "Reward model", "ppo": "PPO"}


def _finish(
    folder: RunFolder,
    stage: str,
    metrics: dict[str, float | None],
    *,
    gates: tuple[GateResult, ...] = (),
) -> None:
    summary = Summary(
        stage,
        "completed",
        1,
        metrics=metrics,
        gates=gates,
        seconds={"total": 97.0},
        versions=VERSIONS,
        git_commit="0f3c1d2e" * 5,
        config_hash="9b1f22c07d5e4a31",
        title=TITLES[stage],
    )
    write_summary(folder, summary)
    folder.config.parent.mkdir(exist_ok=True)
    folder.config.write_text(
        "seed: 1\nmodule:\n  ppo:\n    kl_coef: 0.05\n    max_new_tokens: 24\n"
    )
    folder.config.with_name("overrides.yaml").write_text("- +experiment=ppo\n- seed=1\n")
