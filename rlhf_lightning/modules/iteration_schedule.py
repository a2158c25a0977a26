"""Learning rates by iteration, which at a resume are those that are asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from rlhf_lightning.modules.checkpoint_state import say_changed

# What is no hyper-parameter: how a step is computed, and what a schedule keeps.
_NOT_ASKED = frozenset({"params", "initial_lr", "foreach", "fused", "capturable", "differentiable"})


class IterationSchedule(LambdaLR):
    """`LambdaLR` that leaves the optimizer its settings when a checkpoint is loaded.

    A checkpoint holds the learning rate, betas, epsilon and weight decay of its own run, which
    torch puts in the place of those that the optimizer was made with. What differs is set back and
    said; the moments of the optimizer and the place in the schedule are those of the checkpoint.
    The next rate is that of this schedule, which may be a longer one.

    Args:
        optimizer: as it was made.
        factor: iteration -> what multiplies each learning rate.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, factor: Callable[[int], float]) -> None:
        self._asked = [
            {name: value for name, value in group.items() if name not in _NOT_ASKED}
            for group in optimizer.param_groups
        ]
        super().__init__(optimizer, factor)

    def state_dict(self) -> dict[str, Any]:
        """Return the state without what was asked for, which each run knows of itself."""
        return {name: value for name, value in super().state_dict().items() if name != "_asked"}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take the place in the schedule; the optimizer's own state has been restored before."""
        super().load_state_dict(dict(state_dict))
        groups = self.optimizer.param_groups
        for index, (group, asked) in enumerate(zip(groups, self._asked, strict=True)):
            saved = group | {"lr": self.base_lrs[index]}
            of_group = f" of group {index + 1}" if len(groups) > 1 else ""
            for name, value in asked.items():
                if not _same(value, saved.get(name)):
                    word = "learning_rate" if name == "lr" else name
                    say_changed(f"{word}{of_group}", value, saved.get(name))
                    group[name] = value
                    if name == "lr":
                        self.base_lrs[index] = group["initial_lr"] = value
            # The rate of the checkpoint is of its own schedule: of a finished run it is 0.
            group["lr"] = self.base_lrs[index] * self.lr_lambdas[index](self.last_epoch)
        self._last_lr = [group["lr"] for group in groups]


def _same(value: Any, saved: Any) -> bool:
    if isinstance(value, tuple | list) and isinstance(saved, tuple | list):
        return list(value) == list(saved)
    return bool(value == saved)
