"""One rank of a tiny stage under a real strategy: `train_stage.py STAGE STRATEGY OUT [MODEL]`.

Every rank takes its contiguous share of the same global batches. Rank 0 writes the gathered
weights, each rank what it sampled.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader

from rlhf_lightning.distributed.collectives import full_state
from rlhf_lightning.distributed.strategy import FSDP2Strategy
from rlhf_lightning.hparams import LoraHparams, SamplingHparams
from rlhf_lightning.models.ppo_models import ppo_models
from tests.builders.stages import (
    RecordedPPO,
    ppo_hparams,
    preference_batch,
    prompts,
    sft_batch,
    tiny_module,
    tiny_reward,
    tiny_sft,
    trainer,
)

ROWS = 8
SAO: dict[str, Any] = {
    "surrogate": "masked_ratio",
    "ratio_base": "sampler",
    "cliprange_high": 0.3,
    "num_value_epochs": 2,
    "value_trainable": ["*mlp*", "head*"],
}
ITERATIONS = 3


def module_of(stage: str, model: str, out: Path) -> Any:
    if stage == "sft":
        return tiny_sft(model, micro_batch_size=3)
    if stage == "reward":
        return tiny_reward(model, micro_batch_size=3)
    own = SAO if stage == "sao" else {}
    hparams = ppo_hparams(num_ppo_epochs=1, num_minibatches=1, micro_batch_size=3, kl_target=2.0,
                          kl_horizon=50, **own)  # fmt: skip
    options: dict[str, Any] = {"sampling": SamplingHparams(max_new_tokens=9)}
    if stage == "ppo_lora":
        source = out / "base"
        options["models"] = partial(
            ppo_models, source, source, value_head="zero", lora=LoraHparams(r=4, alpha=8)
        )
    return tiny_module(model, ppo=hparams, **options)


def batches_of(stage: str) -> list[Any]:
    if stage == "sft":
        return [sft_batch(seed=i) for i in range(ITERATIONS)]
    if stage == "reward":
        return [preference_batch(seed=i) for i in range(ITERATIONS)]
    return [prompts(iteration, rows=ROWS) for iteration in range(ITERATIONS)]


def strategy_of(name: str, world_size: int) -> Any:
    timeout = timedelta(seconds=60)
    if name == "ddp":
        return DDPStrategy(process_group_backend="gloo", timeout=timeout)
    # In fp32, or ranks would differ from one process by the rounding of bf16.
    options: Any = {"num_devices": world_size, "timeout": timeout, "compute_dtype": None}
    options["sharded_checkpoints"] = False  # or an optimizer's state would not be gathered
    if name == "fsdp":
        return FSDP2Strategy(**options)
    if name == "hybrid":
        return FSDP2Strategy(**options, shard_over=world_size // 2)
    if name == "offload":
        return FSDP2Strategy(**options, cpu_offload=True)
    return "auto"


def main(stage: str, strategy: str, out: Path, model: str = "llama") -> None:
    torch.manual_seed(1)
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if stage == "ppo_lora" and not (out / "base").exists():
        raise FileNotFoundError(f"{out}/base: the test writes it")
    share = ROWS // world_size
    batches = [b[rank * share : (rank + 1) * share] for b in batches_of(stage)]
    module = module_of(stage, model, out)
    lightning_trainer = trainer(
        devices=world_size,
        strategy=strategy_of(strategy, world_size),
        use_distributed_sampler=False,
        default_root_dir=out,
    )
    lightning_trainer.fit(module, DataLoader(batches, batch_size=None))
    state = full_state(module)
    results: dict[str, Any] = {
        "metrics": {k: float(v) for k, v in lightning_trainer.callback_metrics.items()}
    }
    if isinstance(module, RecordedPPO):
        results["sequences"] = [r.sequences for r in module.rollouts]
        results["masks"] = [r.response_mask for r in module.rollouts]
        results["kl_coef"] = module.controls.kl_coef
        results["steps"] = module.num_optimizer_steps
        results["passes"] = module.algorithm.num_passes
    if rank == 0:
        results["state"] = state
    torch.save(results, out / f"rank_{rank}.pt")


def leave() -> None:
    """End this process."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # FSDP2 on gloo now and then aborts while the interpreter ends


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), *sys.argv[4:])
    leave()
