"""Whole runs on a second device: checkpoints, the end of a stage, the export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from safetensors.torch import load_file

from rlhf_lightning.runs.summary import read_summary
from tests.builders.mirror import on_mirror, recorded, trainer_options
from tests.builders.runs import completed

RUNS = {
    "sft": ("sft", []),
    "sft, lora": ("sft", ["lora=lora"]),
    "reward": ("reward", ["module.reward.normalization_samples=16"]),
    "reward, lora": ("reward", ["lora=lora", "module.reward.normalization_samples=16"]),
    "ppo": ("ppo", ["artifacts.reward=null"]),
    "grpo": ("grpo", ["artifacts.reward=null"]),
}
SHORT = ["trainer.limit_train_batches=3", "evaluation.num_prompts=4"]


def run(name: str, device: str, start: Path, folder: Path, *more: str) -> dict[str, Any]:
    """Return the metrics of a finished run and the weights that it exported."""
    own, build = trainer_options(device), L.Trainer.__init__

    def on_device(self: L.Trainer, *args: Any, **given: Any) -> None:
        build(self, *args, **(given | own))

    stage, overrides = RUNS[name]
    L.Trainer.__init__ = on_device  # type: ignore[method-assign]
    try:
        with recorded() as log:
            made = completed(folder / device, stage, start, *SHORT, *overrides, *more)
    finally:
        L.Trainer.__init__ = build  # type: ignore[method-assign]
    return {
        "kernels": sum(log.kernels.values()),
        "metrics": read_summary(made).metrics,
        "weights": load_file(made.export / "model.safetensors"),
        "checkpoint": torch.load(made.last_checkpoint, map_location="cpu", weights_only=True)[
            "state_dict"
        ],
    }


def assert_alike(there: dict[str, Any], here: dict[str, Any]) -> None:
    """Compare finished runs on two devices."""
    for part in ("weights", "checkpoint"):
        assert here[part]
        torch.testing.assert_close(there[part], here[part], rtol=1e-2, atol=1e-4)
    assert there["metrics"].keys() == here["metrics"].keys() != set()
    for metric, value in here["metrics"].items():
        if not metric.startswith(("time/", "throughput/")):
            expected = pytest.approx(value, rel=2e-2, abs=2e-3, nan_ok=True)
            assert there["metrics"][metric] == expected, metric


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", RUNS)
def test_a_run_of_the_command_line_ends_as_on_a_cpu(name, start, tmp_path):
    here = run(name, "cpu", start, tmp_path)
    there = on_mirror(run, name, "mirror", start, tmp_path, timeout=500)
    assert there["kernels"] > 1000
    assert_alike(there, here)


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", RUNS)
def test_a_run_of_the_command_line_on_cuda_ends_as_on_a_cpu(name, start, tmp_path):
    here = run(name, "cpu", start, tmp_path)
    # TF32, which the command allows, would round more than the comparison does.
    there = run(name, "cuda", start, tmp_path, "trainer.matmul_precision=highest")
    assert_alike(there, here)
