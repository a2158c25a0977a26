"""The three stages' datamodules on numbered records, and a module that notes what it is fed."""

from __future__ import annotations

import pytest
import torch
from lightning import LightningModule, Trainer

from rlhf_lightning.data.datamodules import (
    DemonstrationDataModule,
    PreferenceDataModule,
    PromptDataModule,
)
from rlhf_lightning.data.records import (
    DemonstrationRecord,
    PreferenceRecord,
    PromptRecord,
    TextRecord,
)

MAKE = {
    "prompts": lambda i: PromptRecord(f"p{i}" + "a" * (i % 5), columns={"number": str(i)}),
    "demonstrations": lambda i: DemonstrationRecord(f"p{i}", "c" * (i % 7)),
    "preferences": lambda i: PreferenceRecord(f"p{i}", "c" * (i % 7 + 1), "r"),
    "texts": lambda i: TextRecord(f"text {i}" + "t" * (i % 9)),
}


class CountingSource:
    """Makes records by number, and counts how often it is asked."""

    def __init__(self, num_train=23, num_validation=7):
        self.ranges = {"train": range(num_train), "validation": range(100, 100 + num_validation)}
        self.asked = []

    def records(self, kind, split):
        self.asked.append((kind, split))
        return [MAKE[kind](i) for i in self.ranges[split]]


class Recorder(LightningModule):
    """Trains nothing under manual optimization, takes steps, and notes every batch it gets."""

    def __init__(self, fail_at=None):
        super().__init__()
        self.automatic_optimization = False
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.fail_at = fail_at
        self.seen = []
        self.validated = []

    def training_step(self, batch, batch_idx):
        if batch_idx == self.fail_at:
            raise KeyboardInterrupt
        for _ in range(batch_idx % 3 + 1):
            self.optimizers().step()
        self.seen.append((batch_idx, batch))

    def validation_step(self, batch, batch_idx):
        self.validated.append(batch)

    def configure_optimizers(self):
        return torch.optim.SGD([self.weight], lr=0.1)


def fit(datamodule, *, callback=None, ckpt_path=None, fail_at=None, **options):
    module = Recorder(fail_at)
    trainer = Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        callbacks=[callback] if callback else None,
        **options,
    )
    if fail_at is None:
        trainer.fit(module, datamodule=datamodule, ckpt_path=ckpt_path)
    else:
        with pytest.raises(SystemExit):
            trainer.fit(module, datamodule=datamodule, ckpt_path=ckpt_path)
    return module


def prompts(tokenizer, source=None, **options):
    defaults = {"batch_size": 4, "num_iterations": 14, "max_prompt_length": 20, "seed": 0}
    return PromptDataModule(source or CountingSource(), tokenizer, **(defaults | options))


def demonstrations(tokenizer, source=None, **options):
    defaults = {"batch_size": 4, "num_epochs": 2, "max_length": 20, "seed": 0}
    return DemonstrationDataModule(source or CountingSource(), tokenizer, **(defaults | options))


def preferences(tokenizer, source=None, **options):
    defaults = {"batch_size": 4, "num_iterations": 14, "max_length": 20, "seed": 0}
    return PreferenceDataModule(source or CountingSource(), tokenizer, **(defaults | options))


STAGES = {"sft": demonstrations, "reward": preferences, "ppo": prompts}


def content(batch):
    """Return everything a batch holds, as something that can be compared."""
    return {
        name: value.tolist() if isinstance(value, torch.Tensor) else value
        for name, value in vars(batch).items()
    }


def contents(seen):
    return [(index, content(batch)) for index, batch in seen]
