"""Responses that were sampled one iteration before they are trained on.

Legend: B rows, P padded prompt, R response.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlhf_lightning.batches import Generation, PromptBatch
from rlhf_lightning.distributed.collectives import gathered

_PER_TOKEN = ("responses", "response_mask", "logprobs")


class PendingGeneration:
    """The responses to the prompts of the next iteration; empty before the first one.

    Prompts are not kept: the loader gives them again, at another width.
    """

    def __init__(self) -> None:
        self.iteration = -1
        self.rows: dict[str, Tensor] = {}  # by name; all have the rows as first dimension
        self._waiting: tuple[PromptBatch, Callable[[], Generation]] | None = None

    def exchange(
        self,
        prompts: PromptBatch,
        iteration: int,
        sample: Callable[[PromptBatch, int, Any], Any],
        generator: Any,
        *,
        is_last: bool,
    ) -> tuple[PromptBatch, Generation]:
        """Return prompts and responses of an iteration; start sampling those of the next one.

        Args:
            prompts: prompts of the iteration, and those of the next one as spares.
            iteration: number of the iteration, from 0.
            sample: samples from the policy as it is now: prompts, iteration and what to call.
            generator: generates the responses. One in processes of its own has a method `begin`,
                which lets them write in the background and returns what waits for them.
            is_last: no other iteration follows.

        Raises:
            ValueError: if the two iterations differ in their number of prompts.
            RuntimeError: if the responses of an iteration after the first are missing.
        """
        own, following = prompts[~prompts.spare], prompts[prompts.spare]
        if len(own) != len(following):
            told = f"rollout_lag=1 needs one spare a prompt, has {len(following)} for {len(own)}"
            fix = "train with a PromptDataModule, which adds them, or use rollout_lag=0"
            raise ValueError(f"{told}: {fix}")
        generation = self.take(iteration, own)
        if generation is None:
            if iteration > 0:
                told = f"the responses of iteration {iteration + 1} are missing"
                raise RuntimeError(f"{told}: start again with resume=never")
            generation = sample(own, iteration, generator)
        if not is_last:
            begin = getattr(generator, "begin", None)
            begun = sample(following, iteration + 1, begin or generator)
            wait = begun if begin else lambda: begun
            self.iteration, self._waiting = iteration + 1, (following, wait)
        return own, generation

    def _wait_for_generation(self) -> None:
        if self._waiting is None:
            return
        prompts, wait = self._waiting
        made, self._waiting = wait(), None
        self.rows = {"row_ids": prompts.row_ids, "finish_reason": made.finish_reason}
        self.rows["responses"] = made.sequences[:, -made.response_mask.shape[1] :]
        self.rows["response_mask"] = made.response_mask
        if made.logprobs is not None:
            self.rows["logprobs"] = made.logprobs

    def take(self, iteration: int, prompts: PromptBatch) -> Generation | None:
        """Return the responses to these prompts; None if it has none of this iteration.

        Raises:
            ValueError: if it has those of the iteration, but not of these prompts.
        """
        if iteration != self.iteration:
            return None
        self._wait_for_generation()
        same = prompts.row_ids.unsqueeze(1) == self.rows["row_ids"].to(prompts.row_ids.device)
        if not bool(same.any(1).all()):
            told = f"the responses of iteration {iteration + 1} were sampled for other prompts"
            raise ValueError(f"{told}: the data has changed; start again with resume=never")
        index = same.int().argmax(1)
        rows = {name: value.to(index.device)[index] for name, value in self.rows.items()}
        width = max(int(rows["response_mask"].sum(-1).max()), 1)
        rows |= {name: rows[name][:, :width] for name in _PER_TOKEN if name in rows}
        sequences = torch.cat([prompts.input_ids, rows.pop("responses")], 1)
        del rows["row_ids"]
        return Generation(sequences, **rows)

    def state_dict(self) -> dict[str, Any]:
        """Return iteration and rows of all ranks for a checkpoint; every rank must call it."""
        self._wait_for_generation()
        ranks = gathered({name: value.cpu() for name, value in self.rows.items()})
        return {"iteration": self.iteration, "rows": _joined(ranks)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the rows of a checkpoint; `take` then finds those of this rank."""
        self.iteration, self.rows = int(state["iteration"]), dict(state["rows"])
        self._waiting = None


def _joined(ranks: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the rows of all ranks one after the other, responses padded to one width."""
    joined: dict[str, Tensor] = {}
    for name in ranks[0]:
        parts = [rank[name] for rank in ranks]
        if name in _PER_TOKEN:
            width = max(part.shape[1] for part in parts)
            parts = [pad(part, (0, width - part.shape[1])) for part in parts]
        joined[name] = torch.cat(parts)
    return joined
