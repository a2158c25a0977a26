"""A tiny real PPO run with the doctor, and the callbacks that a run has."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from rlhf_lightning.callbacks.checkpointing import AtomicCheckpointIO, IterationCheckpoint
from rlhf_lightning.callbacks.doctor.callback import Doctor
from rlhf_lightning.callbacks.exact_resume import RandomState
from rlhf_lightning.callbacks.run_tables import MetricsLog
from rlhf_lightning.data.datamodules import PromptDataModule
from rlhf_lightning.data.sources.given import GivenRows
from rlhf_lightning.doctor.thresholds import DoctorThresholds
from rlhf_lightning.runs.folder import RunFolder
from tests.builders.models import EOS, PAD, tiny_tokenizer
from tests.builders.record_files import TEN_PROMPTS
from tests.builders.stages import tiny_module, trainer

ITERATIONS = 8


def doctor_of(folder: Path, **options: Any) -> Doctor:
    limits = {"window": 2, "baseline_iterations": 2, "raise_after": 2} | options.pop("limits", {})
    return Doctor(RunFolder(folder), DoctorThresholds(**limits), **options)


def fit(
    folder: Path,
    doctor: Doctor,
    *,
    resume: bool = False,
    pad: int = PAD,
    precision: str = "32-true",
    saves: Mapping[str, Any] = MappingProxyType({}),
    **changes: Any,
) -> Any:
    """Train the tiny module with the callbacks that a run has, in their order."""
    torch.manual_seed(99 if resume else 1)
    module = tiny_module(pad=pad, **changes)
    data = PromptDataModule(
        GivenRows(
            [row | {"domain": "ab"[i % 2]} for i, row in enumerate(TEN_PROMPTS)],
            validation_fraction=0,
        ),
        tiny_tokenizer(pad_is_eos=pad == EOS),
        batch_size=8,
        num_iterations=ITERATIONS,
        max_prompt_length=16,
        seed=5,
    )
    run_folder = RunFolder(folder)
    the_trainer = trainer(
        enable_checkpointing=True,
        precision=precision,
        plugins=[AtomicCheckpointIO()],
        callbacks=[
            doctor,
            RandomState(),
            MetricsLog(run_folder),
            IterationCheckpoint(
                run_folder.checkpoints, **({"every_n_iterations": 2, "keep_last": 5} | dict(saves))
            ),
        ],
    )
    start = run_folder.last_checkpoint if resume else None
    the_trainer.fit(module, datamodule=data, ckpt_path=start, weights_only=True)
    return module


def second(ids: Tensor, finished: bool) -> float:
    return float(ids.float().mean())
