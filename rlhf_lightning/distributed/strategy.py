"""Strategies: the placement of models on devices."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from torchmetrics import Metric

from rlhf_lightning.arguments import FLOATING, Count, checked
from rlhf_lightning.distributed.checkpoint import load_shards, load_whole, save_shards
from rlhf_lightning.distributed.collectives import REPLICATE, SHARD, mesh_in_groups


class FSDP2Strategy(ModelParallelStrategy):
    """FSDP2 over all devices, or over groups of them.

    Args:
        num_devices: processes of the run; None takes those of the Trainer.
        shard_over: neighbouring devices that share one copy of every model; each such group holds
            the whole, and gradients are averaged between groups.
        cpu_offload: keep shards, gradients and optimizer state in host memory.
        sharded_checkpoints: a folder to which each rank writes its share; False gathers everything
            for one file, which the first rank writes while the others wait.
        gradient_sync: when gradients are exchanged: after each "micro_batch", or once a "step",
            until when they are whole on every rank, four bytes for each trained weight.
        timeout: how long a rank waits for the others.
        compute_dtype: dtype of forward and backward, for modules that were given none; weights,
            gradients and optimizer state stay in fp32.
    """

    @checked
    def __init__(
        self,
        *,
        num_devices: Count | None = None,
        shard_over: Count | None = None,
        cpu_offload: bool = False,
        sharded_checkpoints: bool = True,
        gradient_sync: Literal["micro_batch", "step"] = "micro_batch",
        timeout: timedelta = timedelta(minutes=30),
        compute_dtype: Annotated[torch.dtype, FLOATING] | None = torch.bfloat16,
    ) -> None:
        super().__init__(
            data_parallel_size="auto" if num_devices is None else num_devices,
            tensor_parallel_size="auto" if num_devices is None else 1,
            save_distributed_checkpoint=sharded_checkpoints,
            # The norm of gradients that are not on the device is exchanged by gloo.
            process_group_backend="cpu:gloo,cuda:nccl"
            if cpu_offload and torch.cuda.is_available()
            else None,
            timeout=timeout,
        )
        self.num_devices = num_devices
        self.shard_over = shard_over
        self.cpu_offload = cpu_offload
        self.gradient_sync = gradient_sync
        self.compute_dtype = compute_dtype

    def setup_environment(self) -> None:
        """Start the process group, and lay the devices out in groups."""
        super().setup_environment()
        kind = self.root_device.type
        count = self.num_devices or self.world_size
        self._device_mesh = mesh_in_groups(kind, count, self.shard_over or count)
        assert self.lightning_module is not None
        self.lightning_module._device_mesh = self._device_mesh

    @property
    def mesh_of_shards(self) -> Any:
        """The mesh that a model is sharded over, with its copies where there are several."""
        mesh: Any = self.device_mesh
        return mesh[SHARD] if mesh[REPLICATE].size() == 1 else mesh[REPLICATE, SHARD]

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

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write a file from rank 0, or a folder from all ranks."""
        if self._save_distributed_checkpoint:
            save_shards(checkpoint, Path(self.broadcast(filepath)))
        else:
            super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint of any strategy, as data, whatever is asked for."""
        path = Path(self.broadcast(checkpoint_path))
        load = load_shards if path.is_dir() else load_whole
        assert self.model is not None
        rest: dict[str, Any] = load(path, self.model, self.optimizers)
        return rest


def make_strategy(settings: Mapping[str, Any], *, num_devices: int) -> Strategy | str:
    """Return Lightning's strategy; "fsdp" means FSDP2.

    Args:
        settings: those of the group `strategy`.
        num_devices: processes of the run.
    """
    timeout = timedelta(minutes=settings["timeout_minutes"])
    if settings["name"] == "auto":
        return "auto"
    if settings["name"] == "ddp":
        return DDPStrategy(timeout=timeout)
    dtype = settings.get("compute_dtype")
    return FSDP2Strategy(
        num_devices=num_devices,
        shard_over=settings.get("shard_over"),
        cpu_offload=bool(settings.get("cpu_offload")),
        sharded_checkpoints=settings.get("checkpoint") == "sharded",
        gradient_sync=settings.get("gradient_sync") or "micro_batch",
        compute_dtype=None if dtype is None else getattr(torch, dtype),
        timeout=timeout,
    )
