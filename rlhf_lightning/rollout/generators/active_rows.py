"""The rows of a generation that are still being written, and their forwards.

Legend: A rows still being written, P padded prompt, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf_lightning.batches import PromptBatch
from rlhf_lightning.models.forward import equal_widths
from rlhf_lightning.rollout.generators.kv_cache import InPlaceCache, cache_argument


@dataclass(frozen=True)
class Prefill:
    """Distinct prompts, the shortest first, and the rows that continue each.

    Args:
        input_ids: `[U, P]`, padded on the left.
        lengths: lengths of the U prompts, in tokens.
        rows: `[B]` rows of the batch, sorted by their prompt.
        prompts: `[B]` the prompt of each of `rows`.
    """

    input_ids: Tensor
    lengths: tuple[int, ...]
    rows: Tensor
    prompts: Tensor

    @classmethod
    def of(cls, batch: PromptBatch) -> Prefill:
        """Sort the rows of `batch`; equal prompts (several samples of one) are read once."""
        # Padding counts as -1, so the order of the dictionary puts shorter prompts first.
        marked = torch.where(batch.attention_mask, batch.input_ids, -1)
        marked, prompt_of_row = torch.unique(marked, dim=0, return_inverse=True)
        prompts, rows = prompt_of_row.sort(stable=True)
        lengths = (marked >= 0).sum(-1).clamp(min=1)
        return cls(marked.clamp(min=0), tuple(lengths.tolist()), rows, prompts)

    @property
    def all_distinct(self) -> bool:
        """True if no two rows have the same prompt."""
        return len(self.lengths) == len(self.rows)


# Padded prompt tokens that cost what one more forward costs: it reads all weights once more.
PADDING_BUDGET = {"cpu": 128, "cuda": 2048}


class RunningRows:
    """Rows still being written, in the first slots of a cache.

    Args:
        prompts: `[B, P]`, padded on the left.
        model: causal language model that continues them.
        max_new_tokens: longest response, in tokens.
        prefill_tokens: largest number of prompt tokens in one forward.
        widened: hold 16-bit keys and values as float32.
        cache: one with room for all this, to be written over; None makes one.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        prompts: PromptBatch,
        *,
        max_new_tokens: int,
        prefill_tokens: int,
        widened: bool = False,
        cache: InPlaceCache | None = None,
    ) -> None:
        self.model = model
        self.width = prompts.input_ids.shape[1]  # P
        self.prefill_tokens = prefill_tokens
        self.prefill = Prefill.of(prompts)
        self.rows = self.prefill.rows  # [A] row of the batch in each slot
        lengths = torch.tensor(self.prefill.lengths)
        self.lengths = lengths[self.prefill.prompts.cpu()]  # [A], stays on the host
        self.columns = torch.arange(self.width + max_new_tokens, device=self.rows.device)
        self.cache = cache or InPlaceCache(
            model.config,
            slots=len(prompts),
            prompt_columns=self.width,
            max_columns=self.width + max_new_tokens,
            widened=widened,
        )
        self.cache_argument = cache_argument(model, self.cache)

    def read_prompts(self) -> Tensor:
        """Return `[A, V]` logits of the first response tokens."""
        prefill = self.prefill
        lengths = torch.tensor(prefill.lengths)
        waste = PADDING_BUDGET.get(self.rows.device.type, PADDING_BUDGET["cuda"])
        logits = {}
        for run in equal_widths(prefill.lengths, waste=waste, budget=self.prefill_tokens):
            part = slice(run.start, run.stop)
            start = self.width - prefill.lengths[run.stop - 1]
            self.cache.use(first_row=run.start, rows=len(run), start=start, end=start)
            logits[run.start] = self._forward(
                prefill.input_ids[part, start:], lengths[part], start=start, end=start
            )
        joined = torch.cat([logits[start] for start in sorted(logits)])  # [U, V]
        start = self.width - prefill.lengths[-1]
        self.cache.use(first_row=0, rows=len(self.rows), start=start, end=self.width)
        if prefill.all_distinct:
            return joined
        self.cache.copy_rows(prefill.prompts, slice(0, len(self.rows)))
        return joined[prefill.prompts]

    def keep(self, going: Tensor, tokens: Tensor) -> Tensor:
        """Drop the rows where `going` `[A]`, on the host, is False; return the others' `tokens`.

        The last rows move into the slots of those that left, so that a row that ends costs the
        copy of one row at most, whatever the size of the batch.
        """
        count = int(going.sum())
        if count == len(going):
            return tokens
        slots = torch.arange(count)
        free = (~going[:count]).nonzero().flatten()
        moved = going[count:].nonzero().flatten() + count
        slots[free] = moved
        device = self.rows.device
        if count and len(moved):
            self.cache.copy_rows(
                moved.to(device, non_blocking=True), free.to(device, non_blocking=True)
            )
        self.lengths = self.lengths[slots]
        slots = slots.to(device, non_blocking=True)
        self.rows = self.rows[slots]
        return tokens[slots]

    def step(self, tokens: Tensor, t: int) -> Tensor:
        """Append `tokens` `[A]`, number `t` of their responses; return the next `[A, V]` logits."""
        end = self.width + t
        start = self.width - int(self.lengths.max())  # columns that are padding for all rows go
        self.cache.use(first_row=0, rows=len(tokens), start=start, end=end)
        self.cache.reserve(end + 1)
        return self._forward(tokens.unsqueeze(-1), self.lengths, start=start, end=end)

    def _forward(self, input_ids: Tensor, lengths: Tensor, *, start: int, end: int) -> Tensor:
        """Return `[A, V]` logits after `input_ids` `[A, Q]`, which follow column `end`."""
        first = (self.width - lengths).to(input_ids.device, non_blocking=True).unsqueeze(-1)
        end_after = end + input_ids.shape[1]
        mask = None
        if int(lengths.min()) < self.width - start:  # without padding attention needs no mask
            mask = (self.columns[start:end_after] >= first).long()
        model: Any = self.model
        output = model(
            input_ids=input_ids,
            attention_mask=mask,
            position_ids=(self.columns[end:end_after] - first).clamp(min=0),
            use_cache=True,
            logits_to_keep=1,
            **self.cache_argument,
        )
        logits: Tensor = output.logits[:, -1]
        return logits
