"""One rank of a tiny PPO run that saves, or loads what others have saved.

`checkpoint_stage.py save STRATEGY OUT` trains three iterations; after two of them it writes
`OUT/full.ckpt` and, under FSDP2, `OUT/sharded.ckpt`. `checkpoint_stage.py load STRATEGY OUT
CHECKPOINT...` continues each of them for one iteration. The first rank writes weights and optimizer
after the second and after the third iteration. The value model alone is trained for the first
`CRITIC_WARMUP` iterations.
"""

from __future__ import annotations

import os
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import lightning as L
import torch

from rlhf_lightning.callbacks.checkpointing import AtomicCheckpointIO
from rlhf_lightning.callbacks.exact_resume import RandomState
from rlhf_lightning.data.datamodules import PromptDataModule
from rlhf_lightning.data.sources.given import GivenRows
from rlhf_lightning.distributed.collectives import full_state
from rlhf_lightning.distributed.strategy import FSDP2Strategy
from tests.builders.models import tiny_tokenizer
from tests.builders.record_files import TEN_PROMPTS
from tests.builders.stages import ppo_hparams, tiny_module, trainer
from tests.multiprocess.train_stage import leave, strategy_of

SAVED, LAST = 2, 3
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))


class Record(L.Callback):
    """Keeps what a run starts with, or what it is after the second iteration, and saves that."""

    def __init__(self, save_to: Path | None) -> None:
        self.save_to = save_to
        self.start: dict[str, Any] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        if self.save_to is None:
            self.start = state_of(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.save_to is None or batch_idx + 1 != SAVED:
            return
        self.start = state_of(trainer, pl_module)
        trainer.save_checkpoint(self.save_to / "full.ckpt")
        strategy: Any = trainer.strategy
        if isinstance(strategy, FSDP2Strategy):
            strategy._save_distributed_checkpoint = True
            trainer.save_checkpoint(self.save_to / "sharded.ckpt")
            strategy._save_distributed_checkpoint = False


def state_of(trainer: L.Trainer, module: Any) -> dict[str, Any]:
    """Return weights and optimizer state, gathered; all ranks call it."""
    weights = full_state(module)  # first: what is gathered still has not the optimizer's parameters
    optimizer = trainer.strategy.optimizer_state(trainer.optimizers[0])
    schedule = trainer.lr_scheduler_configs[0].scheduler.state_dict()
    kept = {"weights": weights, "optimizer": optimizer, "kl": module.controls.kl_coef}
    # A copy: on the CPU nothing else would be one.
    return deepcopy(kept | {"epoch": schedule["last_epoch"], "steps": trainer.global_step})


def run(strategy: str, out: Path, checkpoint: str | None = None) -> None:
    torch.manual_seed(99 if checkpoint else 1)
    record = Record(None if checkpoint else out)
    hparams = ppo_hparams(
        num_ppo_epochs=2,
        num_minibatches=1,
        micro_batch_size=3,
        kl_target=2.0,
        kl_horizon=50,
        critic_warmup_iterations=int(os.environ.get("CRITIC_WARMUP", "0")),
    )
    module = tiny_module("llama", ppo=hparams)
    data = PromptDataModule(
        GivenRows(TEN_PROMPTS, validation_fraction=0),
        tiny_tokenizer(),
        batch_size=8,
        num_iterations=LAST,
        max_prompt_length=16,
        seed=5,
    )
    lightning_trainer = trainer(
        devices=WORLD_SIZE,
        strategy=strategy_of(strategy, WORLD_SIZE),
        use_distributed_sampler=False,
        default_root_dir=out,
        plugins=[AtomicCheckpointIO()],
        callbacks=[RandomState(), record],
    )
    lightning_trainer.fit(module, datamodule=data, ckpt_path=checkpoint)
    assert lightning_trainer.fit_loop.epoch_loop.total_batch_idx + 1 == LAST
    assert len(module.rollouts) == (LAST - SAVED if checkpoint else LAST)
    end = state_of(lightning_trainer, module)
    if lightning_trainer.is_global_zero:
        name = f"{len(list(out.glob('*.pt')))}.pt"
        torch.save({"start": record.start, "end": end}, out / name)


if __name__ == "__main__":
    what, name, folder, *checkpoints = sys.argv[1:]
    for each in checkpoints if what == "load" else [None]:
        run(name, Path(folder), each)
    leave()
