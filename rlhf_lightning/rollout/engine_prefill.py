"""In which order prompts are read, and how many at a time.

Legend: B rows, P padded prompt, U distinct prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_lightning.batches import PromptBatch


@dataclass(frozen=True)
class Prefill:
    """Distinct prompts, the shortest first, and the rows that continue each.

    Args:
        input_ids: `[U, P]`, padded on the left.
        lengths: of the U prompts.
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
        """Whether every row has a prompt of its own."""
        return len(self.lengths) == len(self.rows)


def equal_widths(lengths: Sequence[int], *, waste: int, budget: int) -> list[range]:
    """Cut ascending `lengths` into runs that are read in one forward each.

    Args:
        lengths: tokens of each prompt, ascending.
        waste: padding in one forward at most; as much as costs what another forward costs.
        budget: tokens in one forward at most, padding included; bounds the memory.

    Returns:
        Ranges of indices that cover all prompts, each once.
    """
    runs: list[range] = []
    end = len(lengths)
    while end:
        width, start, padding = lengths[end - 1], end - 1, 0
        while start:
            padding += width - lengths[start - 1]
            if padding > waste or (end - start + 1) * width > budget:
                break
            start -= 1
        runs.append(range(start, end))
        end = start
    return runs
