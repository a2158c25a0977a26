"""Skip optimizer steps that are not finite; too many in a row stop the run."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlhf_lightning.batches import RolloutBatch, TensorBatch
from rlhf_lightning.distributed.collectives import agreed_max, global_sum, rank
from rlhf_lightning.modules.metrics import read_numbers

logger = logging.getLogger(__name__)

# In the order in which they are computed, so that the first one named is the cause.
_ROLLOUT_TOKENS = (
    *("logprobs", "ref_logprobs", "teacher_logprobs", "values"),
    *("rewards", "advantages", "returns"),
)


class NonFiniteError(RuntimeError):
    """Too many optimizer steps in a row had a loss, a gradient or a score that is not finite.

    Args:
        message: the non-finite values, and the fix.
        batch: this rank's share of the batch of the last of those steps.
        iteration: number of the iteration, from 1.
    """

    def __init__(self, message: str, batch: TensorBatch, iteration: int) -> None:
        super().__init__(message)
        self.batch = batch
        self.iteration = iteration
        self.saved: str = ""  # where the batch was saved

    def __str__(self) -> str:
        where = f" The batch is in {self.saved}." if self.saved else ""
        return f"{self.args[0]}{where}"


class SkippedSteps:
    """Skips steps that are not finite, on every rank alike, and stops after too many in a row.

    Args:
        limit: how many in a row are skipped before the run stops.
        key: name of the limit in a configuration.
    """

    def __init__(self, limit: int, key: str) -> None:
        self.limit = limit
        self.key = key
        self.consecutive_skips = 0
        self.in_iteration = 0
        self.num_iterations = self.num_taken = 0

    def should_step(
        self, values: Mapping[str, Tensor | float], batch: TensorBatch, batch_idx: int
    ) -> bool:
        """Return whether `values` allow an optimizer step; see `should_continue`."""
        go_on = self.should_continue(non_finite_names(values), batch, batch_idx)
        if go_on:
            self.consecutive_skips = 0
            self.num_taken += 1
        return go_on

    def should_continue(self, problems: Sequence[str], batch: TensorBatch, batch_idx: int) -> bool:
        """Return whether to continue with a batch; count a skipped step otherwise.

        Ranks that disagree all skip; each of them must call this equally often.

        Args:
            problems: non-finite values, in words, reduced over ranks.
            batch: this rank's share of the batch.
            batch_idx: number of the iteration, from 0.

        Raises:
            NonFiniteError: on every rank, if more than `limit` steps in a row were skipped.
        """
        device = next(value.device for value in vars(batch).values() if isinstance(value, Tensor))
        if not agreed_max(len(problems), device):
            return True
        self.consecutive_skips += 1
        self.in_iteration += 1
        what = ", ".join(problems) or "something on another rank"
        told = (
            f"iteration {batch_idx + 1}: {what} is not finite: no step was taken "
            f"({self.consecutive_skips} in a row, {self.key}={self.limit} are skipped)"
        )
        if self.consecutive_skips > self.limit:
            fix = "Lower the learning rate, or look into the batch."
            raise NonFiniteError(f"{told}. {fix}", batch, batch_idx + 1)
        if rank() == 0:
            logger.warning("%s", told)
        return False

    def end_iteration(self) -> float:
        """Return how many steps of the iteration were skipped, and start the next one."""
        count, self.in_iteration = self.in_iteration, 0
        self.num_iterations += 1
        return float(count)

    def end_run(self) -> None:
        """Check that the run has trained something.

        Raises:
            RuntimeError: if no iteration of it took an optimizer step.
        """
        if self.num_iterations and not self.num_taken:
            why = "loss, gradients or scores were not finite (see the warnings), or no score"
            told = f"no optimizer step was taken in {self.num_iterations} iterations"
            raise RuntimeError(f"{told}: {why}")

    def state_dict(self) -> dict[str, Any]:
        """Return plain values for a checkpoint, which is written between two iterations."""
        return {"in_a_row": self.consecutive_skips, "taken": self.num_taken}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the values of a checkpoint."""
        self.consecutive_skips = int(state["in_a_row"])
        self.num_taken = int(state.get("taken", 1))


def non_finite_names(values: Mapping[str, Tensor | float]) -> list[str]:
    """Return `name=value` of each number that is not finite; vectors, which are counts, are not."""
    values = {k: v for k, v in values.items() if not (isinstance(v, Tensor) and v.ndim)}
    return [
        f"{name}={value}"
        for name, value in zip(values, read_numbers(list(values.values())), strict=True)
        if not math.isfinite(value)
    ]


def non_finite_in_rollout(rollout: RolloutBatch) -> tuple[list[str], int]:
    """Return what of a rollout is not finite, in words, and its rows with a score, of all ranks."""
    mask = rollout.response_mask
    tokens = [name for name in _ROLLOUT_TOKENS if getattr(rollout, name) is not None]
    # A mask and not an index: how many there are would be read from the device.
    parts = [(rollout.scores, rollout.scored)]
    parts += [(getattr(rollout, name), mask) for name in tokens]
    counts = torch.stack([(~part.isfinite() & of).sum() for part, of in parts])
    sizes = torch.stack([of.sum() for _, of in parts])
    counts, sizes = global_sum(torch.stack([counts, sizes])).tolist()
    names = ("scores", *tokens)
    found = [
        f"{n} of {total} {name}" for name, n, total in zip(names, counts, sizes, strict=True) if n
    ]
    return found[:1], sizes[0]  # the rest follows from it


def finite(values: Mapping[str, Tensor | float]) -> dict[str, float]:
    """Return the numbers that are finite."""
    numbers = zip(values, read_numbers(list(values.values())), strict=True)
    return {name: value for name, value in numbers if math.isfinite(value)}
