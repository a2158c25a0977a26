"""With early stopping a run ends with its best weights, not with those it went on to."""

from __future__ import annotations

import math

import pytest
import torch

from rlhf_lightning.models.factory import load_policy
from rlhf_lightning.runs.folder import read_metrics
from rlhf_lightning.runs.manifest import read_manifest
from rlhf_lightning.runs.summary import read_summary
from tests.builders.runs import completed

pytestmark = pytest.mark.timeout(200)
OVERSHOOTS = [  # the loss falls for a few iterations, and is far worse after that
    "module.sft.learning_rate=0.05",
    "scheduler.name=constant",
    "trainer.limit_train_batches=null",
    "trainer.limit_val_batches=null",
    "data.num_iterations=12",
    "trainer.validations=12",
    "callbacks.checkpoint.every_n_iterations=null",
    "callbacks.checkpoint.keep_last=1",
    "evaluation.gold=null",
    "gates=none",
]


@pytest.mark.thorough
def test_what_is_measured_exported_and_published_is_the_best(start, tmp_path):
    published = tmp_path / "published"
    stopped = completed(
        tmp_path / "sft",
        "sft",
        start,
        *OVERSHOOTS,
        "callbacks.early_stopping={patience: 2}",
        f"artifacts.publish={published}",
    )
    rows = read_metrics(stopped.metrics)
    best = min(rows, key=lambda row: row.get("val/loss", math.inf))
    assert len(rows) < 12  # it was stopped
    assert rows[-1]["iteration"] == best["iteration"] + 2
    assert rows[-1]["val/loss"] > 1.01 * best["val/loss"]
    assert read_summary(stopped).metrics["val/loss"] == pytest.approx(best["val/loss"], rel=1e-4)
    assert read_summary(stopped).about["weights"] == f"those of iteration {best['iteration']:.0f}"
    assert "12 optimizer steps are too few" in (stopped.export / "README.md").read_text()
    last, kept = (
        torch.load(path, weights_only=True)["state_dict"]
        for path in (stopped.last_checkpoint, stopped.best_checkpoint)
    )
    assert read_manifest(published).metrics["val/loss"] == pytest.approx(best["val/loss"], rel=1e-4)
    for folder in (stopped.export, published):
        weights = load_policy(folder).state_dict()
        for name, value in weights.items():
            assert torch.equal(value, kept[f"policy.{name}"]), name
        assert any(not torch.equal(v, last[f"policy.{n}"]) for n, v in weights.items())
