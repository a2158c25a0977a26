"""One optimizer step from micro-batches: the same for every module that minimises a loss.

Learning rates over iterations are at a resume those that are asked for.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import lightning as L
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from rlhf_lightning.arguments import Fraction, checked
from rlhf_lightning.batches import TensorBatch
from rlhf_lightning.distributed.collectives import (
    accumulating,
    agreed_max,
    average_gradients,
    global_sum,
    rank,
    world_size,
)
from rlhf_lightning.misfit import shown
from rlhf_lightning.models.compute_copies import compute_copies
from rlhf_lightning.models.cpu_kernels import side_by_side
from rlhf_lightning.models.learning_rates import Kind, default_learning_rate
from rlhf_lightning.models.lora import AdaptedPolicy, AdaptedScalarModel
from rlhf_lightning.modules.checkpoint_state import log_changed

logger = logging.getLogger(__name__)
Optimizer = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
Measured = dict[str, Tensor]
# A micro-batch and global counts -> the micro-batch's share of a loss, with its metrics.
Term = Callable[[Any, Any], tuple[Tensor, Measured]]


class StepCounts(NamedTuple):
    """Global counts of an optimizer step, over all its micro-batches and ranks.

    Args:
        num_tokens: actions that are trained on, a scalar tensor.
        num_sequences: responses that are, likewise.
        num_reward_tokens: actions whose rewards are known, which a value model learns: fewer where
            a teacher teaches about responses without a score.
    """

    num_tokens: Tensor
    num_sequences: Tensor | float
    num_reward_tokens: Tensor


def accumulate_gradients(
    module: L.LightningModule,
    batch: TensorBatch,
    parts: list[Tensor],
    terms: Sequence[Term],
    counts: Any,
    models: Sequence[nn.Module] = (),
) -> Measured:
    """Add up the gradients of one loss over micro-batches and ranks; return its metrics.

    The loss is a sum of terms. They are taken one after the other, each over all micro-batches, so
    that only one of them holds activations; on a CPU with several threads two are taken together,
    each by half of the threads, if they are of different models.

    Args:
        module: whose `manual_backward` and strategy are used.
        batch: rows of this rank.
        parts: rows of each micro-batch.
        terms: each a micro-batch's share (sums over its tokens divided by a global count).
        counts: global counts that the terms divide by.
        models: whose gradients the terms give, if each is of one model alone.

    Raises:
        TypeError: if a term does not return a loss with its metrics.
    """
    count = agreed_max(len(parts), module.device)
    measured: Measured = {}
    apart = 1 < len(terms) == len(models) and world_size() == 1
    beside = side_by_side(*models) if apart else None
    with compute_copies(module):
        for together in [[term] for term in terms] if beside is None else [terms]:
            for index in range(count):
                # A rank with fewer micro-batches runs one again at weight 0, or the others hang.
                rows, weight = (parts[index], 1.0) if index < len(parts) else (parts[0], 0.0)
                tasks = [partial(_computed, term, batch[rows], counts) for term in together]
                with accumulating(module.trainer.strategy, module, last=index + 1 == count):
                    found = [task() for task in tasks] if beside is None else beside.run(tasks)
                    losses = [loss for loss, _ in found]
                    loss = losses[0] if beside is None else beside.sum(losses)
                    # Gradients are averaged over ranks, so the sum needs the world size back.
                    module.manual_backward(loss * (weight * world_size()))
                for _, measures in found:
                    measured |= {
                        name: measured.get(name, 0.0) + value.detach() * weight
                        for name, value in measures.items()
                    }
                # They hold thousands of small objects, between which the C library could not join
                # what is free: the next micro-batch would find no room for its tensors.
                del loss, losses, found, measures
    average_gradients(module.parameters(), module.trainer.strategy)
    return {name: global_sum(value) for name, value in measured.items()}


def _computed(term: Term, micro_batch: TensorBatch, counts: Any) -> tuple[Tensor, Measured]:
    found: Any = term(micro_batch, counts)
    loss, measures = found if isinstance(found, tuple) and len(found) == 2 else (None, None)
    is_loss = isinstance(loss, Tensor) and loss.requires_grad and not loss.ndim
    if is_loss and isinstance(measures, Mapping) and all(map(_is_measure, measures.items())):
        return loss, measures  # type: ignore[return-value]
    told = f"{getattr(term, '__qualname__', term)} returned {shown(found)}"
    fix = "return (loss, {name: measure}), each a scalar tensor, the loss with its graph"
    raise TypeError(f"{told}: {fix}")


def _is_measure(item: tuple[str, Any]) -> bool:
    """Return whether a measure is a scalar tensor; vectors, whose names have no slash, are ours."""
    name, value = item
    return isinstance(value, Tensor) and not (value.ndim and "/" in name)


def parameter_group(model: nn.Module, kind: Kind, learning_rate: float | None) -> dict[str, Any]:
    """Return what is trained of a model with its learning rate; None is that of its size."""
    if learning_rate is None:
        base = model.base.model if isinstance(model, AdaptedPolicy | AdaptedScalarModel) else None
        if base is None:
            count = sum(parameter.numel() for parameter in model.parameters())
        else:
            count = base.num_parameters()  # an element of a 4-bit weight holds two
        learning_rate = default_learning_rate(kind, count, lora=base is not None)
        rank_zero_info(f"{kind} learning rate {learning_rate:g}, by the size of {count:,} weights")
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return {"params": trained, "lr": learning_rate}


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that climbs, or whose first step on a gradient of 0 would be 0 / 0.

    Raises:
        ValueError: if `maximize` is true or `eps` is 0.
    """
    if any(group.get("maximize") for group in optimizer.param_groups):
        raise ValueError("maximize=True would raise the loss: leave it out")
    if any(group.get("eps") == 0 for group in optimizer.param_groups):
        raise ValueError("eps=0 divides by 0 where a gradient is 0: use more, such as 1e-8")


def warn_of_unused_rate(optimizer: torch.optim.Optimizer) -> None:
    """Warn where an optimizer was made with a learning rate that its groups do not have."""
    parameter = inspect.signature(type(optimizer)).parameters.get("lr")
    if parameter is None or parameter.default is parameter.empty or rank() != 0:
        return
    given = float(optimizer.defaults.get("lr", parameter.default))
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    if given not in (parameter.default, *rates):
        told = "%s was made with lr=%g, which trains nothing: set learning_rate in hparams (%s)"
        now = ", ".join(f"{rate:g}" for rate in rates)
        logger.warning(told, type(optimizer).__name__, given, now)


# What is no hyper-parameter: how a step is computed, and what a schedule keeps.
_NOT_ASKED = frozenset({"params", "initial_lr", "foreach", "fused", "capturable", "differentiable"})


@checked
@dataclass(frozen=True)
class Schedule:
    """A factor on the learning rate: linear warm-up, then constant, linear or cosine decay to 0.

    Args:
        name: "constant", "linear" or "cosine".
        warmup_fraction: share of the iterations that warm up.

    Raises:
        ValueError: for another name, or a fraction outside 0 <= f < 1.
    """

    name: Literal["constant", "linear", "cosine"] = "linear"
    warmup_fraction: Fraction = 0.0

    def factor(self, iteration: int, num_iterations: int) -> float:
        """Return the factor of the iteration that follows `iteration` finished ones."""
        warmup = math.ceil(self.warmup_fraction * num_iterations)
        if iteration < warmup:
            return (iteration + 1) / warmup
        if self.name == "constant":
            return 1.0
        done = min((iteration - warmup) / max(num_iterations - warmup, 1), 1.0)
        return 1.0 - done if self.name == "linear" else 0.5 * (1 + math.cos(math.pi * done))


class IterationSchedule(LambdaLR):
    """`LambdaLR` that leaves the optimizer its settings when a checkpoint is loaded.

    A checkpoint has the learning rate, betas, epsilon and weight decay of its run, with which torch
    replaces those of the new optimizer. Differences are reset and logged; the moments of the
    optimizer and the place in the schedule are those of the checkpoint. The next rate is that of
    this schedule, which may be a longer one.

    Args:
        optimizer: optimizer in its initial state.
        schedule: factor on each learning rate.
        num_iterations: iterations of the whole run.
        extra_factor: another factor, which may change.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        schedule: Schedule,
        num_iterations: int,
        extra_factor: Callable[[], float] = lambda: 1.0,
    ) -> None:
        self._asked = [
            {name: value for name, value in group.items() if name not in _NOT_ASKED}
            for group in optimizer.param_groups
        ]
        self.num_iterations = num_iterations
        self.schedule = schedule
        super().__init__(
            optimizer, lambda done: schedule.factor(done, self.num_iterations) * extra_factor()
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state without what was asked for, which each run knows of itself."""
        left_out = ("_asked", "schedule")
        return {name: it for name, it in super().state_dict().items() if name not in left_out}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take the place in the schedule; the optimizer's own state has been restored before."""
        now = self.num_iterations
        super().load_state_dict(dict(state_dict))
        before, self.num_iterations = self.num_iterations, now
        groups = self.optimizer.param_groups
        for index, (group, asked) in enumerate(zip(groups, self._asked, strict=True)):
            saved = group | {"lr": self.base_lrs[index]}
            of_group = f" of group {index + 1}" if len(groups) > 1 else ""
            for name, value in asked.items():
                if not _same(value, saved.get(name)):
                    word = "learning_rate" if name == "lr" else name
                    log_changed(f"{word}{of_group}", value, saved.get(name))
                    group[name] = value
                    if name == "lr":
                        self.base_lrs[index] = group["initial_lr"] = value
            # The checkpoint's rate follows its run's schedule: after a finished run it is 0.
            group["lr"] = self.base_lrs[index] * self.lr_lambdas[index](self.last_epoch)
        self._last_lr = [group["lr"] for group in groups]
        if rank() == 0:
            self._tell_length(before)

    def _tell_length(self, before: int) -> None:
        """Warn where the checkpoint is of a run of another length, or of one that is over."""
        done, now = self.last_epoch, self.num_iterations
        if before != now:
            old, new = (self.schedule.factor(done, length) for length in (before, now))
            told = "this run has %s iterations, that of the checkpoint had %s: the learning rate "
            told += "is at %.3g of its full value where it would have been %.3g"
            logger.warning(told, now, before, new, old)
        if done >= now:
            told = "the checkpoint has %s iterations, and this run has %s: it is over, give more"
            logger.warning(told, done, now)


def _same(value: Any, saved: Any) -> bool:
    if isinstance(value, tuple | list) and isinstance(saved, tuple | list):
        return list(value) == list(saved)
    return bool(value == saved)
