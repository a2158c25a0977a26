"""Generation: the Generator protocol and its engines.

Legend: B rows, P padded prompt, R response, A rows still being written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel
from transformers.cache_utils import DynamicCache

from rlhf_lightning.batches import FINISHED_BY_LENGTH, FINISHED_BY_STOP, Generation, PromptBatch
from rlhf_lightning.functional.sequences import position_ids, response_mask
from rlhf_lightning.rollout.noise import RowNoise, sample


@contextmanager
def weights_cast_once() -> Iterator[None]:
    """Let autocast keep the weights it casts, for forwards between which no weight changes.

    Lightning turns that cache off, rightly for training: but then every token of a generation
    would cast every weight again.
    """
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(True)
    try:
        yield
    finally:
        torch.clear_autocast_cache()  # what was cast without a graph must not reach an update
        torch.set_autocast_cache_enabled(before)


class Generator(Protocol):
    """Continues prompts. The same noise gives the same tokens whatever the batch looks like."""

    def __call__(
        self,
        model: PreTrainedModel,
        prompts: PromptBatch,
        *,
        noise: RowNoise,
        temperature: float,
        max_new_tokens: int,
    ) -> Generation:
        """Return one response a prompt, sampled from softmax(logits / temperature)."""


def neutral_generation_config(stop_ids: Sequence[int], pad_token_id: int) -> GenerationConfig:
    """Return a config that hides nothing: no top-k, no top-p, no repetition penalty.

    A field left unset would be filled from the checkpoint's own generation config, where
    `top_k=50` hides even when nobody wrote it.
    """
    return GenerationConfig(
        do_sample=False,
        top_k=0,
        top_p=1.0,
        min_p=None,
        typical_p=1.0,
        temperature=1.0,
        repetition_penalty=1.0,
        no_repeat_ngram_size=0,
        eos_token_id=list(stop_ids),
        pad_token_id=pad_token_id,
    )


class CachedGenerator:
    """Token-by-token sampling with a key-value cache; finished rows leave the batch.

    Args:
        stop_ids: ids that end a response.
        pad_token_id: fills what follows a response.
    """

    def __init__(self, stop_ids: Sequence[int], pad_token_id: int) -> None:
        self.stop_ids = tuple(stop_ids)
        self.pad_token_id = pad_token_id

    @torch.no_grad()
    @weights_cast_once()
    def __call__(
        self,
        model: PreTrainedModel,
        prompts: PromptBatch,
        *,
        noise: RowNoise,
        temperature: float,
        max_new_tokens: int,
    ) -> Generation:
        """Return one response a prompt; see `Generator`."""
        device = prompts.input_ids.device
        rows = len(prompts)
        responses = torch.full((rows, max_new_tokens), self.pad_token_id, device=device)
        stop = torch.tensor(self.stop_ids, device=device)
        active = torch.arange(rows, device=device)  # [A]
        going = torch.ones(rows, dtype=torch.bool, device=device)  # [A]
        mask = prompts.attention_mask
        positions = position_ids(mask)
        cache = DynamicCache(config=model.config)
        logits = _step(model, prompts.input_ids, mask, positions, cache)
        last = positions[:, -1]
        for t in range(max_new_tokens):
            uniform = noise.uniform(prompts.row_ids[active], t)
            tokens = sample(logits, uniform, temperature=temperature)  # [A]
            responses[active, t] = tokens
            going = going & ~torch.isin(tokens, stop)
            if t + 1 == max_new_tokens or not bool(going.any()):
                break
            # Dropping rows copies the cache, so do it only when it halves the work.
            if int(going.sum()) * 2 <= len(active):
                kept = going.nonzero().flatten()
                cache.batch_select_indices(kept)
                active, mask, last, tokens = active[kept], mask[kept], last[kept], tokens[kept]
                going = going[kept]
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
            last = last + 1
            logits = _step(model, tokens.unsqueeze(-1), mask, last.unsqueeze(-1), cache)
        return as_generation(prompts.input_ids, responses, self.stop_ids, self.pad_token_id)


def _step(
    model: PreTrainedModel, input_ids: Tensor, mask: Tensor, positions: Tensor, cache: Any
) -> Tensor:
    output = model(
        input_ids=input_ids,
        attention_mask=mask.long(),
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    logits: Tensor = output.logits[:, -1]  # [A, V]
    return logits


class TransformersGenerator:
    """`model.generate` with every hidden setting neutralised; for models with unusual caches.

    The sampling itself is ours, so that noise belongs to rows; `generate` then takes the only
    token left.
    """

    def __init__(self, stop_ids: Sequence[int], pad_token_id: int) -> None:
        self.stop_ids = tuple(stop_ids)
        self.pad_token_id = pad_token_id

    @torch.no_grad()
    @weights_cast_once()
    def __call__(
        self,
        model: PreTrainedModel,
        prompts: PromptBatch,
        *,
        noise: RowNoise,
        temperature: float,
        max_new_tokens: int,
    ) -> Generation:
        """Return one response a prompt; see `Generator`."""
        sampler = _RowSampler(prompts, noise, temperature)
        config = neutral_generation_config(self.stop_ids, self.pad_token_id)
        config.max_new_tokens = max_new_tokens
        own_config, model.generation_config = model.generation_config, config
        try:
            sequences = cast("Callable[..., Tensor]", model.generate)(
                input_ids=prompts.input_ids,
                attention_mask=prompts.attention_mask.long(),
                generation_config=config,
                logits_processor=LogitsProcessorList([sampler]),
                synced_gpus=False,
            )
        finally:
            model.generation_config = own_config
        responses = sequences[:, prompts.input_ids.shape[1] :]
        return as_generation(prompts.input_ids, responses, self.stop_ids, self.pad_token_id)


class _RowSampler(LogitsProcessor):
    """Replaces the scores by one that leaves a single token: the one our noise picks."""

    def __init__(self, prompts: PromptBatch, noise: RowNoise, temperature: float) -> None:
        self.row_ids = prompts.row_ids
        self.prompt_length = prompts.input_ids.shape[1]
        self.noise = noise
        self.temperature = temperature

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores `[B, V]` that are -inf but for the sampled token."""
        uniform = self.noise.uniform(self.row_ids, input_ids.shape[1] - self.prompt_length)
        tokens = sample(scores, uniform, temperature=self.temperature).unsqueeze(-1)
        return torch.full_like(scores, float("-inf")).scatter(1, tokens, 0.0)


def as_generation(
    prompt_ids: Tensor, responses: Tensor, stop_ids: Sequence[int], pad_token_id: int
) -> Generation:
    """Cut `responses` `[B, R]` after their first stop token, and to the longest of them."""
    mask = response_mask(responses, stop_ids)
    width = max(int(mask.sum(-1).max()), 1)
    mask, responses = mask[:, :width], responses[:, :width]
    stopped = (torch.isin(responses, mask.new_tensor(stop_ids, dtype=torch.long)) & mask).any(-1)
    responses = torch.where(mask, responses, pad_token_id)
    return Generation(
        sequences=torch.cat([prompt_ids, responses], 1),
        response_mask=mask,
        finish_reason=torch.where(stopped, FINISHED_BY_STOP, FINISHED_BY_LENGTH),
    )
