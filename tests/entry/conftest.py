"""Runs that several files of tests export, each made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_lightning.runs.folder import RunFolder


@pytest.fixture(scope="session")
def sft(tmp_path_factory: pytest.TempPathFactory, start: Path) -> RunFolder:
    """An SFT run that was killed after its third and last iteration."""
    from tests.builders.runs import killed

    return killed(tmp_path_factory.mktemp("runs") / "sft", "sft", start)


@pytest.fixture(scope="session")
def tracked(tmp_path_factory: pytest.TempPathFactory, start: Path) -> RunFolder:
    """A PPO run in an offline W&B run; its weights are random, so it misses its gates."""
    from tests.builders.runs import TRACKED_ITERATIONS, completed

    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("WANDB_DATA_DIR", raising=False)
        return completed(
            tmp_path_factory.mktemp("tracked") / "ppo",
            "ppo",
            start,
            "artifacts.reward=null",
            "logger=wandb",
            "logger.mode=offline",
            "gates=ppo",
            "trainer.limit_train_batches=null",
            f"data.num_iterations={TRACKED_ITERATIONS}",
            "callbacks.samples.num_samples=3",
            "evaluation.num_samples=5",
        )
