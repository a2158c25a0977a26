"""Modules of this project built from its configuration, and a Trainer without callbacks."""

from __future__ import annotations

from typing import Any

import lightning as L

from benchmarks.worker import Task
from rlhf_lightning.app.config.compose import register
from rlhf_lightning.app.config.settings import TrainSettings
from rlhf_lightning.app.config.validate import load_settings

PRECISIONS: dict[str, Any] = {"fp32": "32-true", "bf16": "bf16-mixed"}


def training_settings(experiment: str, *overrides: str) -> TrainSettings:
    """Return the settings that the command line says by `+experiment=...` and `overrides`."""
    register()
    return load_settings(TrainSettings, "train", [f"+experiment={experiment}", *overrides])


def bare_trainer(task: Task, watch: L.Callback) -> L.Trainer:
    """Return a Trainer for one epoch that logs and saves nothing, as the peer's does."""
    return L.Trainer(
        accelerator="gpu" if task["device"] == "cuda" else "cpu",
        devices=1,
        max_epochs=1,
        precision=PRECISIONS[task["precision"]],
        callbacks=[watch],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
