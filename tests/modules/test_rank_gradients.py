"""Gradients of a step are those of all rows at once: over micro-batches and over ranks, to 1e-6."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlhf_lightning.distributed.collectives import global_sum
from rlhf_lightning.hparams import DistillationHparams
from rlhf_lightning.modules import optimization
from tests.builders.models import PAD
from tests.builders.ranks import SimulatedRanks
from tests.builders.stages import (
    ROWS,
    STOPS,
    OtherSampler,
    ppo_hparams,
    prompts,
    tiny_distillation,
    tiny_module,
    without_trainer,
)

SAO = {
    "surrogate": "masked_ratio",
    "ratio_base": "sampler",
    "cliprange": 0.3,
    "cliprange_high": 0.4,
    "num_ppo_epochs": 1,
    "num_value_epochs": 2,
    "value_trainable": ("*mlp*", "head*"),
    "gae_lambda_value": 1.0,
    "gae_length_alpha": 0.5,
}


def sao(micro_batch_size: int) -> Any:
    hparams = ppo_hparams(**SAO, micro_batch_size=micro_batch_size)
    return tiny_module("llama", ppo=hparams, generator=OtherSampler(STOPS, PAD))


def distillation(micro_batch_size: int, divergence: str) -> Any:
    hparams = DistillationHparams(
        learning_rate=1e-3, divergence=divergence, micro_batch_size=micro_batch_size
    )
    return tiny_distillation("llama", distillation=hparams, generator=OtherSampler(STOPS, PAD))


OBJECTIVES = {
    "sao": sao,
    **{
        f"distillation, {name}": lambda rows, name=name: distillation(rows, name)
        for name in ("reverse", "forward", "jensen_shannon", "sampled")
    },
}


def steps(monkeypatch: pytest.MonkeyPatch, name: str, size: int, rows: int) -> list[list[Tensor]]:
    """Return the gradient of each optimizer step of an iteration, by rank."""
    found: dict[int, list[Tensor]] = {rank: [] for rank in range(size)}
    modules = [without_trainer(OBJECTIVES[name](rows)) for _ in range(size)]
    strategies = [module.trainer.strategy for module in modules]
    ranks = SimulatedRanks(monkeypatch, size)

    def averaged(parameters: Iterable[nn.Parameter], strategy: Any) -> None:
        gradients = []
        for parameter in parameters:
            mean = None if parameter.grad is None else global_sum(parameter.grad) / size
            gradients.append((torch.zeros_like(parameter) if mean is None else mean).flatten())
            parameter.grad = None  # no step: the next gradient is of the same weights
        found[strategies.index(strategy)].append(torch.cat(gradients))

    monkeypatch.setattr(optimization, "average_gradients", averaged)
    share = ROWS // size
    ranks.run(lambda r: modules[r].training_step(prompts()[r * share : (r + 1) * share], 0))
    return [found[rank] for rank in range(size)]


@pytest.mark.parametrize("name", OBJECTIVES)
def test_gradients_do_not_depend_on_micro_batches_and_ranks(monkeypatch, name):
    (expected,) = steps(monkeypatch, name, 1, ROWS)
    assert len(expected) == (2 if name == "sao" else 1)
    for rank in steps(monkeypatch, name, 2, 3):
        for got, wanted in zip(rank, expected, strict=True):
            assert wanted.abs().max() > 1e-3
            torch.testing.assert_close(got, wanted, rtol=0, atol=1e-6)
