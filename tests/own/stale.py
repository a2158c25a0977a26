"""A generator that lags: it samples from the policy as it was some iterations ago."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from rlhf_lightning import CachedGenerator
from rlhf_lightning.batches import Generation, PromptBatch


class StaleGenerator(CachedGenerator):
    """Samples rollouts with the weights of `lag` iterations before, as a slow engine would.

    Its log-probabilities are those of the weights that sampled. Evaluations sample from the policy
    as it is. For experiments on small models: it keeps `lag` copies of the weights, which a resumed
    run does not have.

    Args:
        stop_ids: ids that end a response.
        pad_token_id: fills what follows a response.
        prefill_tokens: prompt tokens in one forward at most.
        lag: iterations between the weights that sample and those that are trained, at least 0.
    """

    def __init__(
        self, stop_ids: Sequence[int], pad_token_id: int, *, prefill_tokens: int = 16_384, lag: int
    ) -> None:
        super().__init__(stop_ids, pad_token_id, prefill_tokens=prefill_tokens)
        self.kept: deque[dict[str, Tensor]] = deque(maxlen=lag + 1)

    def __call__(self, model: PreTrainedModel, prompts: PromptBatch, **how: Any) -> Generation:
        """Return one response a prompt."""
        if how["noise"].purpose != "rollout":
            return super().__call__(model, prompts, **how)
        now = {name: value.detach().clone() for name, value in model.state_dict().items()}
        self.kept.append(now)
        model.load_state_dict(self.kept[0])
        try:
            return super().__call__(model, prompts, **how)
        finally:
            model.load_state_dict(now)
