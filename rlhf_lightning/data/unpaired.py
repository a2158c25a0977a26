"""Unpaired rows for KTO: each with its prompt and a response to another prompt."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlhf_lightning.data.encode import EncodedPreference, EncodedSequence


def with_other_responses(
    rows: Sequence[EncodedSequence], others: Sequence[EncodedSequence], *, max_length: int
) -> list[EncodedPreference]:
    """Return unpaired rows, each with its prompt and a response to another prompt.

    It is the response of the row before among `others`, without those of the same prompt; before
    the first row comes the last one. It only estimates a KL, and is cut where it does not fit.

    Args:
        rows: rows of one split, with labels.
        others: rows of the training split.
        max_length: most tokens of prompt and other response.

    Raises:
        ValueError: if all `others` have the prompt of a row.
    """
    parts = [np.split(row.input_ids, [int(np.argmax(row.loss_mask))]) for row in others]
    prompts = [prompt.tobytes() for prompt, _ in parts]
    # The row before with another prompt; the second pass knows what is before the first row.
    before: list[int | None] = [None] * len(others)
    for n in (*range(len(others)), *range(len(others))):
        before[n] = n - 1 if prompts[n - 1] != prompts[n] else before[n - 1]
    paired = []
    for number, row in enumerate(rows):
        length = int(np.argmax(row.loss_mask))
        prompt = row.input_ids[:length]
        last = (number - 1) % len(others)
        other = last if prompts[last] != prompt.tobytes() else before[last]
        if other is None:
            raise ValueError(
                "all unpaired rows have one prompt: KTO estimates its KL from responses to other "
                "prompts; add rows of other prompts"
            )
        joined = np.concatenate([prompt, parts[other][1]])[:max_length]
        paired.append(
            EncodedPreference(row.input_ids, joined, length, domain=row.domain, label=row.label)
        )
    return paired
