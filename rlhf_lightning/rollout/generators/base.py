"""Generation: the Generator protocol and its engines.

Legend: B rows, P padded prompt, R response, A rows still being written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, cast

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from rlhf_lightning.arguments import Size, StopIds, TokenId, checked
from rlhf_lightning.batches import FINISHED_BY_LENGTH, FINISHED_BY_STOP, Generation, PromptBatch
from rlhf_lightning.functional.masked import zero_off_mask
from rlhf_lightning.functional.sequences import response_mask
from rlhf_lightning.models.cpu_kernels import one_token_attention
from rlhf_lightning.rollout.generators.active_rows import RunningRows
from rlhf_lightning.rollout.generators.prepared_weights import (
    linear_weights_prepared,
    weights_cast_once,
)
from rlhf_lightning.rollout.noise import RowNoise, check_finite, sample, sample_unchecked


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
        """Return one response a prompt, sampled from softmax(logits / temperature).

        Engines that know the log-probability of each token under the distribution that they drew
        it from, temperature and truncation included, give it in `Generation.logprobs`.
        """


def gathers_layers(generator: Generator) -> bool:
    """Return whether `generator` runs the policy itself, token by token, and needs it whole."""
    return not getattr(generator, "sends_weights", False)


def neutral_generation_config(stop_ids: Sequence[int], pad_token_id: int) -> GenerationConfig:
    """Return a config that hides nothing: no top-k, no top-p, no repetition penalty.

    A field left unset would be filled from the checkpoint's own generation config, where
    `top_k=50` hides even when it is not written there.
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

    Equal prompts are read once. Prompts are read in groups of like length. A row that ends gives
    its place to the last one, so that no step computes it again.

    Args:
        stop_ids: ids that end a response.
        pad_token_id: fills what follows a response.
        prefill_tokens: prompt tokens in one forward at most; bounds the memory.

    Attributes:
        watch: called with the tokens so far, `[B, t]`, while they are written; behind a row's stop
            token they mean nothing. None calls nothing.
    """

    @checked
    def __init__(
        self, stop_ids: StopIds, pad_token_id: TokenId, *, prefill_tokens: Size = 16_384
    ) -> None:
        self.stop_ids = tuple(stop_ids)
        self.pad_token_id = pad_token_id
        self.prefill_tokens = prefill_tokens
        self.watch: Callable[[Tensor], None] | None = None

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
        steps = torch.arange(max_new_tokens, device=prompts.row_ids.device)
        uniform = noise.uniform(prompts.row_ids.unsqueeze(-1), steps)  # [B, R]
        with (
            linear_weights_prepared(model, rows=len(prompts)),
            one_token_attention(model) as widened,
        ):
            running = RunningRows(
                model,
                prompts,
                max_new_tokens=max_new_tokens,
                prefill_tokens=self.prefill_tokens,
                widened=widened,
            )
            responses, logprobs = self._write(running, uniform, temperature)
        return as_generation(
            prompts.input_ids, responses, self.stop_ids, self.pad_token_id, logprobs
        )

    def _write(
        self, running: RunningRows, uniform: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Return tokens and their log-probabilities `[B, R]`; behind a stop they mean nothing."""
        device, max_new_tokens = uniform.device, uniform.shape[1]
        responses = torch.full(uniform.shape, self.pad_token_id, device=device)
        logprobs = torch.zeros(uniform.shape, device=device)
        stops = torch.tensor(self.stop_ids, dtype=torch.long, device=device)
        logits = running.read_prompts()  # [A, V]
        for t in range(max_new_tokens):
            logits = self._truncated(logits, temperature)
            sampled = sample_unchecked(
                logits, uniform[running.rows, t], temperature=temperature
            )  # [A] each
            tokens = sampled.tokens
            responses[running.rows, t] = tokens
            logprobs[running.rows, t] = sampled.logprobs
            # Not torch.isin: for many ids it sorts, and waits for the device.
            going = (tokens.unsqueeze(-1) != stops).all(-1)
            finite, going = torch.stack([sampled.finite, going]).cpu()  # the only wait of a token
            check_finite(finite)
            if self.watch is not None:
                self.watch(responses[:, : t + 1])
            tokens = running.keep(going, tokens)
            if t + 1 == max_new_tokens or not len(tokens):
                break
            logits = running.step(tokens, t)
        return responses, logprobs

    def _truncated(self, logits: Tensor, temperature: float) -> Tensor:
        """Return the logits as they are: only candidates for labelling may be truncated."""
        return logits


class TransformersGenerator:
    """`model.generate` with every hidden setting neutralised; for models with unusual caches.

    The sampling itself is ours, so that noise belongs to rows; `generate` then takes the only
    token left.
    """

    @checked
    def __init__(self, stop_ids: StopIds, pad_token_id: TokenId) -> None:
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
        return as_generation(
            prompts.input_ids,
            responses,
            self.stop_ids,
            self.pad_token_id,
            torch.stack(sampler.logprobs, 1),
        )


class _RowSampler(LogitsProcessor):
    """Replaces the scores by one that leaves a single token: the one our noise picks."""

    def __init__(self, prompts: PromptBatch, noise: RowNoise, temperature: float) -> None:
        self.row_ids = prompts.row_ids
        self.prompt_length = prompts.input_ids.shape[1]
        self.noise = noise
        self.temperature = temperature
        self.logprobs: list[Tensor] = []  # [B] each, of the tokens so far

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores `[B, V]` that are -inf but for the sampled token."""
        uniform = self.noise.uniform(self.row_ids, input_ids.shape[1] - self.prompt_length)
        sampled = sample(scores, uniform, temperature=self.temperature)
        self.logprobs.append(sampled.logprobs)
        return torch.full_like(scores, float("-inf")).scatter(1, sampled.tokens.unsqueeze(-1), 0.0)


def as_generation(
    prompt_ids: Tensor,
    responses: Tensor,
    stop_ids: Sequence[int],
    pad_token_id: int,
    logprobs: Tensor | None = None,
) -> Generation:
    """Cut `responses` `[B, R]` after their first stop token, and to the longest of them.

    `logprobs` `[B, R]` of the tokens, where the engine gives them, are cut alike.
    """
    mask = response_mask(responses, stop_ids)
    width = max(int(mask.sum(-1).max()), 1)
    mask, responses = mask[:, :width], responses[:, :width]
    stopped = (torch.isin(responses, mask.new_tensor(stop_ids, dtype=torch.long)) & mask).any(-1)
    responses = torch.where(mask, responses, pad_token_id)
    return Generation(
        sequences=torch.cat([prompt_ids, responses], 1),
        response_mask=mask,
        finish_reason=torch.where(stopped, FINISHED_BY_STOP, FINISHED_BY_LENGTH),
        logprobs=None if logprobs is None else zero_off_mask(logprobs[:, :width].float(), mask),
    )
