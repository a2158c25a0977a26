"""How models are placed on devices."""

from __future__ import annotations

from datetime import timedelta

from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from omegaconf import DictConfig


def make_strategy(cfg: DictConfig) -> Strategy | str:
    """Return Lightning's strategy; "fsdp" means FSDP2."""
    name = cfg.strategy.name
    if name == "auto":
        return "auto"
    timeout = timedelta(minutes=cfg.strategy.timeout_minutes)
    if name == "ddp":
        return DDPStrategy(timeout=timeout)
    if name == "fsdp":
        size = int(cfg.trainer.devices) * int(cfg.trainer.num_nodes)
        return ModelParallelStrategy(
            data_parallel_size=size,
            tensor_parallel_size=1,
            save_distributed_checkpoint=False,
            timeout=timeout,
        )
    raise ValueError(f"strategy.name={name!r} must be auto, ddp or fsdp")
