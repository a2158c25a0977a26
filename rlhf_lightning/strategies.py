"""How models are placed on devices."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from omegaconf import DictConfig
from torchmetrics import Metric

from rlhf_lightning.distributed import mesh_in_groups


class FSDP2Strategy(ModelParallelStrategy):
    """FSDP2 over all devices, or over groups of them.

    Args:
        num_devices: processes of the run.
        shard_over: neighbouring devices that share one copy of every model; each such group holds
            the whole, and gradients are averaged between groups.
        cpu_offload: shards, gradients and optimizer state are in the memory of the machine.
        timeout: how long a rank waits for the others.
    """

    def __init__(
        self,
        *,
        num_devices: int,
        shard_over: int | None = None,
        cpu_offload: bool = False,
        timeout: timedelta,
    ) -> None:
        super().__init__(
            data_parallel_size=num_devices,
            tensor_parallel_size=1,
            save_distributed_checkpoint=False,
            # The norm of gradients that are not on the device is exchanged by gloo.
            process_group_backend="cpu:gloo,cuda:nccl"
            if cpu_offload and torch.cuda.is_available()
            else None,
            timeout=timeout,
        )
        self.num_devices = num_devices
        self.shard_over = shard_over or num_devices
        self.cpu_offload = cpu_offload

    def setup_environment(self) -> None:
        """Start the process group, and lay the devices out in groups."""
        super().setup_environment()
        kind = self.root_device.type
        self._device_mesh = mesh_in_groups(kind, self.num_devices, self.shard_over)
        assert self.lightning_module is not None
        self.lightning_module._device_mesh = self._device_mesh

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The rank of a process among those that read different rows: all of them."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def model_to_device(self) -> None:
        """Move what is not sharded."""
        assert self.model is not None
        if not self.cpu_offload:
            super().model_to_device()
            return
        for module in self.model.modules():
            if isinstance(module, Metric):
                module.to(self.root_device)
            for name, buffer in module.named_buffers(recurse=False):
                persistent = name not in module._non_persistent_buffers_set
                module.register_buffer(name, buffer.to(self.root_device), persistent=persistent)


def make_strategy(cfg: DictConfig) -> Strategy | str:
    """Return Lightning's strategy; "fsdp" means FSDP2."""
    settings: Mapping[str, Any] = cfg.strategy
    timeout = timedelta(minutes=cfg.strategy.timeout_minutes)
    if cfg.strategy.name == "auto":
        return "auto"
    if cfg.strategy.name == "ddp":
        return DDPStrategy(timeout=timeout)
    return FSDP2Strategy(
        num_devices=int(cfg.trainer.devices) * int(cfg.trainer.num_nodes),
        shard_over=settings.get("shard_over"),
        cpu_offload=bool(settings.get("cpu_offload")),
        timeout=timeout,
    )
