"""Tiny SFT and reward modules, their batches, and steps of several ranks without a Trainer."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_lightning.batches import PreferenceBatch, SFTBatch
from rlhf_lightning.distributed.collectives import global_sum
from rlhf_lightning.hparams import RewardHparams, SFTHparams
from rlhf_lightning.modules import reward, sft
from rlhf_lightning.modules.optimization import clip_and_step
from rlhf_lightning.modules.reward import RewardModule
from rlhf_lightning.modules.schedules import Schedule
from rlhf_lightning.modules.sft import SFTModule
from tests.modules.tiny_ppo import adamw
from tests.simulated_ranks import SimulatedRanks
from tests.tiny import EOS, PAD, prompt_rows, tiny_policy, tiny_scalar_model


def tiny_sft(model_type: str = "gpt2", **hparams: Any) -> Any:
    hparams = {"learning_rate": 1e-3} | hparams
    return SFTModule(
        sft=SFTHparams(**hparams),
        policy=lambda: tiny_policy(model_type),
        optimizer=adamw,
        schedule=Schedule("constant"),
    )


def tiny_reward(model_type: str = "gpt2", *, init_std: float = 0.3, **hparams: Any) -> Any:
    hparams = {"learning_rate": 1e-3} | hparams
    return RewardModule(
        reward=RewardHparams(**hparams),
        model=lambda: tiny_scalar_model(model_type, init_std=init_std),
        optimizer=adamw,
        schedule=Schedule("constant"),
    )


def right_padded(rows: Sequence[Sequence[int]], width: int, fill: int) -> tuple[Tensor, Tensor]:
    ids = torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows])
    return ids, torch.arange(width) < torch.tensor([len(row) for row in rows])[:, None]


PROMPT_LENGTHS = (3, 7, 1, 9, 2, 5, 12, 4)
ANSWER_LENGTHS = (4, 2, 1, 12, 6, 1, 9, 3)
REJECTED_LENGTHS = (3, 9, 2, 6, 12, 4, 2, 4)


def sft_batch(*, width: int = 24, fill: int = PAD, seed: int = 0) -> SFTBatch:
    prompts = prompt_rows(PROMPT_LENGTHS, seed=seed)
    answers = [[*row[:-1], EOS] for row in prompt_rows(ANSWER_LENGTHS, seed=seed + 50)]
    rows = [p + a for p, a in zip(prompts, answers, strict=True)]
    ids, mask = right_padded(rows, width, fill)
    learnt = mask & (torch.arange(width) >= torch.tensor(PROMPT_LENGTHS)[:, None])
    return SFTBatch(ids, mask, learnt, ("",) * len(rows))


def preference_batch(
    *, width: int = 26, fill: int = PAD, seed: int = 0, margin: float = 0.0
) -> PreferenceBatch:
    prompts = prompt_rows(PROMPT_LENGTHS, seed=seed)
    sides = []
    for offset, lengths in ((50, ANSWER_LENGTHS), (70, REJECTED_LENGTHS)):
        answers = [[*row[:-1], EOS] for row in prompt_rows(lengths, seed=seed + offset)]
        rows = [p + a for p, a in zip(prompts, answers, strict=True)]
        sides.append((*right_padded(rows, width, fill), torch.tensor(lengths)))
    (chosen, chosen_mask, longer), (rejected, rejected_mask, shorter) = sides
    return PreferenceBatch(
        chosen_input_ids=chosen,
        chosen_attention_mask=chosen_mask,
        rejected_input_ids=rejected,
        rejected_attention_mask=rejected_mask,
        chosen_length=longer,
        rejected_length=shorter,
        margin=torch.full((8,), margin),
        domains=("",) * 8,
    )


def without_trainer(module: Any) -> Any:
    """Give a module what its `training_step` needs of a Trainer."""
    module.configure_model()
    module._trainer = SimpleNamespace(
        strategy=SimpleNamespace(backward=lambda loss, *_: loss.backward())
    )
    groups = [{"params": list(module.parameters()), "lr": 1e-3}]
    optimizer = adamw(groups)
    module.logged = []
    module.optimizers = lambda: optimizer
    module.lr_schedulers = lambda: SimpleNamespace(step=lambda: None)
    module.log_dict = lambda values, **_: module.logged.append(dict(values))
    return module


def train_ranks(
    monkeypatch: pytest.MonkeyPatch, modules: Sequence[Any], batches: Sequence[Any]
) -> None:
    """Take one step a batch on `len(modules)` ranks, each with its contiguous share."""
    size = len(modules)
    ranks = SimulatedRanks(monkeypatch, size)

    def averaged_step(module: Any, *rest: Any) -> Any:
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.grad = global_sum(parameter.grad) / size
        return clip_and_step(module, *rest)

    for file in (sft, reward):
        monkeypatch.setattr(file, "clip_and_step", averaged_step)

    def one(rank: int) -> None:
        for number, batch in enumerate(batches):
            share = len(batch) // size
            modules[rank].training_step(batch[rank * share : (rank + 1) * share], number)

    ranks.run(one)
