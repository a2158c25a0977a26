"""Who is told of a run while it goes on: W&B, TensorBoard, or metrics.csv alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from rlhf_lightning.callbacks.tensorboard_logger import tensorboard_logger
from rlhf_lightning.callbacks.wandb_logger import IterationWandbLogger, wandb_logger
from rlhf_lightning.composition import plain
from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.public_config import public_config
from rlhf_lightning.runs.resume import config_hash
from rlhf_lightning.runs.summary import git_commit, installed_versions

NO_LOGGER = ("none", "csv")


def make_logger(cfg: DictConfig, folder: RunFolder) -> Any:
    """Return what `logger=` chose as a Lightning logger, or False where metrics.csv is enough."""
    if cfg.logger.kind in NO_LOGGER:
        return False
    if cfg.logger.kind == "tensorboard":
        return tensorboard_logger(folder)
    if cfg.logger.kind == "wandb":
        return _wandb(cfg, folder)
    raise ValueError(f"logger.kind={cfg.logger.kind!r} must be wandb, tensorboard, csv or none")


def sweep_group(name: str) -> str | None:
    """Return the name that the jobs of this sweep share, None outside of a multirun."""
    if not HydraConfig.initialized():
        return None
    config = HydraConfig.get()
    if config.mode != RunMode.MULTIRUN:
        return None
    return f"{name}/{Path(config.sweep.dir).name}"


def _wandb(cfg: DictConfig, folder: RunFolder) -> IterationWandbLogger:
    written = cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=False))
    config = public_config(plain(cfg), written)
    config |= {
        "config_hash": config_hash(written),
        "git_commit": git_commit(),
        "versions": installed_versions(),
    }
    return wandb_logger(
        folder,
        project=cfg.logger.project,
        name=f"{cfg.name}/{folder.path.name}",
        group=cfg.logger.group or sweep_group(cfg.name),
        tags=list(cfg.logger.tags),
        config=config,
        mode=cfg.logger.mode,
    )
