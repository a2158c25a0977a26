"""Answers made by hand, for tests of scorers and rollouts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rlhf_lightning.batches import PromptBatch
from rlhf_lightning.rollout.generators.base import as_generation
from rlhf_lightning.rollout.scorers.base import Responses
from tests.builders.models import EOS, PAD, tiny_tokenizer


def responses_of(
    prompts: PromptBatch, responses: Sequence[Sequence[int]], *, pad: int = PAD
) -> Responses:
    width = max(len(row) for row in responses)
    body = torch.tensor([[*row, *[pad] * (width - len(row))] for row in responses])
    generation = as_generation(prompts.input_ids, body, [EOS], pad)
    return Responses.of(prompts, generation, tiny_tokenizer(pad_is_eos=pad == EOS))
