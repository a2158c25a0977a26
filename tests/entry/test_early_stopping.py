"""With early stopping a run ends with its best weights, not with those it went on to."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from rlhf_lightning.app.config.saved import best_of_early_stopping
from rlhf_lightning.models.factory import load_policy
from rlhf_lightning.runs.folder import RunFolder, read_metrics
from rlhf_lightning.runs.manifest import read_manifest
from rlhf_lightning.runs.summary import read_summary
from tests.builders.runs import completed

pytestmark = pytest.mark.timeout(200)
OVERSHOOTS = [  # the loss falls for a few iterations, and is far worse after that
    "module.sft.learning_rate=0.05",
    "scheduler.name=constant",
    "trainer.limit_train_batches=null",
    "trainer.limit_val_batches=null",
    "data.num_epochs=null",
    "data.num_iterations=12",
    "trainer.validations=12",
    "callbacks.checkpoint.every_n_iterations=null",
    "callbacks.checkpoint.keep_last=1",
    "evaluation.gold=null",
    "gates=none",
]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory, start: Path) -> RunFolder:
    folder = tmp_path_factory.mktemp("runs")
    return completed(
        folder / "sft",
        "sft",
        start,
        *OVERSHOOTS,
        "callbacks.early_stopping={patience: 2}",
        f"artifacts.publish={folder}/published",
    )


def best_row(folder: RunFolder) -> dict[str, float]:
    rows = [row for row in read_metrics(folder.metrics) if "val/loss" in row]
    return min(rows, key=lambda row: row["val/loss"])


def exported(folder: Path) -> dict[str, torch.Tensor]:
    return dict(load_policy(folder).state_dict())


@pytest.mark.thorough
def test_what_is_measured_exported_and_published_is_the_best(stopped):
    rows = read_metrics(stopped.metrics)
    best = best_row(stopped)
    assert len(rows) < 12  # it was stopped
    assert rows[-1]["iteration"] == best["iteration"] + 2
    assert rows[-1]["val/loss"] > 1.01 * best["val/loss"]
    assert read_summary(stopped).metrics["val/loss"] == pytest.approx(best["val/loss"], rel=1e-4)
    last, kept = (
        torch.load(path, weights_only=True)["state_dict"]
        for path in (stopped.last_checkpoint, stopped.best_checkpoint)
    )
    published = stopped.path.parent / "published"
    assert read_manifest(published).metrics["val/loss"] == pytest.approx(best["val/loss"], rel=1e-4)
    for folder in (stopped.export, published):
        for name, value in exported(folder).items():
            assert torch.equal(value, kept[f"policy.{name}"]), name
        assert any(not torch.equal(v, last[f"policy.{n}"]) for n, v in exported(folder).items())


def test_without_early_stopping_it_is_the_last(stopped, tmp_path):
    assert best_of_early_stopping(stopped) is not None
    text, config = stopped.config.read_text(), OmegaConf.load(stopped.config)
    config.callbacks.early_stopping = None
    OmegaConf.save(config, stopped.config)
    try:
        assert best_of_early_stopping(stopped) is None
    finally:
        stopped.config.write_text(text)
