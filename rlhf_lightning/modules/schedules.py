"""Learning rates over iterations, which at a resume are those that are asked for."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.optim.lr_scheduler import LambdaLR

from rlhf_lightning.arguments import Fraction, checked
from rlhf_lightning.distributed.collectives import rank
from rlhf_lightning.modules.checkpoint_state import log_changed

logger = logging.getLogger(__name__)
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
            logger.warning(
                "this run has %s iterations, that of the checkpoint had %s: the learning rate goes "
                "on by the schedule of %s, at %.3g of its full value where it would have been %.3g",
                *(now, before, now, new, old),
            )
        if done >= now:
            logger.warning(
                "the checkpoint has %s iterations of training, and this run has %s: it is over, "
                "and nothing is trained. For more, give more iterations than %s",
                *(done, now, done),
            )


def _same(value: Any, saved: Any) -> bool:
    if isinstance(value, tuple | list) and isinstance(saved, tuple | list):
        return list(value) == list(saved)
    return bool(value == saved)
