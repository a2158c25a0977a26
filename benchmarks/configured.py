"""Modules of this project built from its configuration, and a Trainer without callbacks."""

from __future__ import annotations

from typing import Any

import lightning as L
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from benchmarks.worker import Task
from rlhf_lightning.app.config.compose import conf_dir, register

PRECISIONS: dict[str, Any] = {"fp32": "32-true", "bf16": "bf16-mixed"}


def configuration(experiment: str, *overrides: str) -> DictConfig:
    """Return what the command line composes for `+experiment=...` and `overrides`."""
    register()
    with initialize_config_dir(version_base="1.3", config_dir=str(conf_dir())):
        return compose("train", overrides=[f"+experiment={experiment}", *overrides])


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
