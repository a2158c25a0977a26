"""Engines that sample something else than the policy, or do not know where an answer ends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from rlhf_lightning.rollout.generators.base import CachedGenerator


class TopKGenerator(CachedGenerator):
    """Samples from the k likeliest tokens, as an engine's defaults may."""

    def __init__(self, stop_ids: Sequence[int], pad_token_id: int, *, k: int, **options: Any):
        super().__init__(stop_ids, pad_token_id, **options)
        self.k = k

    def _truncated(self, logits: Tensor, temperature: float) -> Tensor:
        least = logits.topk(self.k).values[:, -1:]
        return logits.masked_fill(logits < least, -math.inf)


class PadStopGenerator(CachedGenerator):
    """Takes the pad token for the end of an answer, and EOS for a word."""

    def __init__(self, stop_ids: Sequence[int], pad_token_id: int, **options: Any):
        super().__init__((pad_token_id,), pad_token_id, **options)
