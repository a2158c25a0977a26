"""Real numbers that are not finite, at chosen iterations: in activations, gradients or scores."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from rlhf_lightning.callbacks.iterations import fresh_metrics
from tests.builders.stages import TokenScorer, some_score


class Poison(Callback):
    """Break the chosen iterations (from 1) and note weights and optimizer around every one.

    Args:
        where: "loss" makes hidden states NaN in training forwards, "gradient" makes one gradient
            infinite and leaves the loss as it is, "nothing" breaks nothing.
        iterations: which ones.
    """

    def __init__(self, where: str, iterations: Collection[int] = ()) -> None:
        self.where = where
        self.iterations = set(iterations)
        self.now = False
        self.before: list[dict[str, Any]] = []
        self.after: list[dict[str, Any]] = []
        self.rows: list[dict[str, float]] = []

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trained: Any = getattr(pl_module, "policy", None) or getattr(pl_module, "model", None)
        if self.where == "loss":
            for module in trained.modules():
                if isinstance(module, nn.LayerNorm):
                    module.register_forward_hook(self._break_training_forward)
        elif self.where == "gradient":
            next(trained.parameters()).register_hook(
                lambda gradient: gradient + math.inf if self.now else gradient
            )

    def _break_training_forward(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return output * math.nan if self.now and torch.is_grad_enabled() else output

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self.now = batch_idx + 1 in self.iterations
        self.before.append(snapshot(pl_module))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.after.append(snapshot(pl_module))
        row = fresh_metrics(trainer)
        self.rows.append({name: value for name, value in row.items() if not math.isnan(value)})

    def moved(self, iteration: int) -> bool:
        return not same(self.before[iteration - 1], self.after[iteration - 1])


def snapshot(module: Any) -> dict[str, Any]:
    optimizer = module.optimizers().optimizer.state_dict()["state"]
    return {
        "weights": [local(p.detach()) for p in module.parameters()],
        "adam": [local(v) for state in optimizer.values() for v in state.values()],
    }


def local(tensor: Any) -> Tensor:
    """Copy a tensor; of a sharded one this rank's part."""
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).clone()


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(
        len(one[key]) == len(other[key])
        and all(torch.equal(a, b) for a, b in zip(one[key], other[key], strict=True))
        for key in one
    )


def scorer_with(values: dict[int, float], rows: int) -> TokenScorer:
    """Score like `some_score`; `values` replaces the first score of an iteration (from 1)."""
    calls = [0]

    def score(ids: Tensor, finished: bool) -> float:
        iteration, row = calls[0] // rows + 1, calls[0] % rows
        calls[0] += 1
        if row == 0 and iteration in values:
            return values[iteration]
        return some_score(ids, finished)

    return TokenScorer(score)
