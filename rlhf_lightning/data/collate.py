"""Encoded rows to padded batches. Attention masks come from lengths, never from ids.

Legend: B rows, P padded prompt tokens, T padded tokens of a sequence. Prompts are padded on the
left, so that generation continues real tokens; all else on the right.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlhf_lightning.batches import PreferenceBatch, PromptBatch, SFTBatch
from rlhf_lightning.data.encode import EncodedPreference, EncodedPrompt, EncodedSequence


@dataclass(frozen=True)
class SFTCollator:
    """Makes an `SFTBatch` of encoded sequences.

    Args:
        pad_token_id: fills the padding; what it is does not matter, it may be EOS.
    """

    pad_token_id: int

    def __call__(self, rows: Sequence[EncodedSequence]) -> SFTBatch:
        """Return the batch, as wide as its longest row."""
        ids, mask = _pad([row.input_ids for row in rows], self.pad_token_id)  # [B, T]
        return SFTBatch(
            input_ids=ids,
            attention_mask=mask,
            loss_mask=_pad([row.loss_mask for row in rows], 0)[0].bool(),
            domains=tuple(row.domain for row in rows),
        )


@dataclass(frozen=True)
class PreferenceCollator:
    """Makes a `PreferenceBatch` of encoded pairs, both sides padded to one width.

    Args:
        pad_token_id: fills the padding; what it is does not matter, it may be EOS.
    """

    pad_token_id: int

    def __call__(self, rows: Sequence[EncodedPreference]) -> PreferenceBatch:
        """Return the batch, as wide as the longest side of its rows."""
        width = max(len(row) for row in rows)
        chosen = [row.chosen_input_ids for row in rows]
        rejected = [row.rejected_input_ids for row in rows]
        chosen_ids, chosen_mask = _pad(chosen, self.pad_token_id, width=width)  # [B, T]
        rejected_ids, rejected_mask = _pad(rejected, self.pad_token_id, width=width)  # [B, T]
        prompt_length = torch.tensor([row.prompt_length for row in rows])  # [B]
        return PreferenceBatch(
            chosen_input_ids=chosen_ids,
            chosen_attention_mask=chosen_mask,
            rejected_input_ids=rejected_ids,
            rejected_attention_mask=rejected_mask,
            chosen_length=chosen_mask.sum(1) - prompt_length,
            rejected_length=rejected_mask.sum(1) - prompt_length,
            margin=torch.tensor([row.margin for row in rows]),
            domains=tuple(row.domain for row in rows),
            row_ids=torch.tensor([row.row_id for row in rows], dtype=torch.int64),
            answer_ids=tuple(
                (_number(c), _number(r)) for c, r in zip(chosen, rejected, strict=True)
            ),
            label=None if rows[0].label is None else torch.tensor([row.label for row in rows]),
        )


def _number(ids: NDArray[np.int32]) -> int:
    return int.from_bytes(hashlib.blake2b(ids.tobytes(), digest_size=8).digest(), "big")


@dataclass(frozen=True)
class PromptCollator:
    """Makes a `PromptBatch` of (encoded prompt, number in the stream) pairs.

    A column that a row lacks is None there.

    Args:
        pad_token_id: fills the padding; what it is does not matter, it may be EOS.
        num_generations: rows that each prompt gets, next to each other: one group.
        num_own: prompts of the iteration, behind which the others are spare; None for all.
    """

    pad_token_id: int
    num_generations: int = 1
    num_own: int | None = None

    def __call__(self, rows: Sequence[tuple[EncodedPrompt, int]]) -> PromptBatch:
        """Return the batch, as wide as its longest prompt."""
        size = self.num_generations
        num_own = len(rows) if self.num_own is None else self.num_own
        prompts = [prompt for prompt, _ in rows for _ in range(size)]
        group_ids = torch.tensor([number for _, number in rows], dtype=torch.int64)
        group_ids = group_ids.repeat_interleave(size)  # [B]
        ids, mask = _pad([p.input_ids for p in prompts], self.pad_token_id, left=True)  # [B, P]
        names = dict.fromkeys(name for prompt in prompts for name in prompt.columns)
        return PromptBatch(
            input_ids=ids,
            attention_mask=mask,
            row_ids=group_ids * size + torch.arange(len(group_ids)) % size,
            domains=tuple(prompt.domain for prompt in prompts),
            columns={name: tuple(p.columns.get(name) for p in prompts) for name in names},
            group_ids=group_ids,
            spare=torch.arange(len(prompts)) >= num_own * size,
        )


def _pad(
    rows: Sequence[Any], value: int, *, width: int | None = None, left: bool = False
) -> tuple[Tensor, Tensor]:
    """Return `[B, T]` int64 rows padded with `value`, and the bool mask of what is not padding."""
    lengths = np.array([len(row) for row in rows])
    width = int(lengths.max()) if width is None else width
    ids = np.full((len(rows), width), value, dtype=np.int64)
    for i, row in enumerate(rows):
        start = width - len(row) if left else 0
        ids[i, start : start + len(row)] = row
    columns = np.arange(width)
    mask = columns >= (width - lengths)[:, None] if left else columns < lengths[:, None]
    return torch.from_numpy(ids), torch.from_numpy(mask)
