"""Peaks of the cached generator: while prompts are read, while a token is written, in sampling."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.pytorch_utils import Conv1D

from rlhf_lightning.app.memory_plan.fake_models import Style
from rlhf_lightning.app.memory_plan.traces import Peaks, autocast, tracked
from rlhf_lightning.app.memory_plan.tracker import CACHE, HEAD, Tracker
from rlhf_lightning.models.heads import PolicyModel
from rlhf_lightning.rollout.generators.kv_cache import InPlaceCache
from rlhf_lightning.rollout.noise import sample_unchecked


def generation_peaks(
    model: PolicyModel, rows: int, prompt: int, new_tokens: int, style: Style, *, read_at_once: int
) -> Peaks:
    """Return what the cached generator holds, but for the copies of weights that it makes.

    Args:
        model: a skeleton.
        rows: answered at once.
        prompt: tokens of each prompt.
        new_tokens: of each answer.
        style: precision and compute dtype.
        read_at_once: prompt tokens in one forward at most.
    """
    together = min(max(read_at_once // prompt, 1), rows)
    with tracked(model.root) as tracker, torch.no_grad(), autocast(style):
        with model.generating() as network, _linears_cast(network, style, tracker):
            cache = InPlaceCache(
                network.config,
                slots=rows,
                prompt_columns=prompt,
                max_columns=prompt + new_tokens,
            )
            cache.reserve(prompt + new_tokens)
            _generation_step(network, cache, 1, past=0, length=1)  # makes the cache's room
            for layer in cache.in_place:
                tracker.relabel(layer.keys, CACHE)
                tracker.relabel(layer.values, CACHE)
            # All prompts but the last few are read already: their logits wait.
            waiting = torch.empty(rows - together, _vocabulary(network), dtype=_logits_dtype(style))
            tracker.relabel(waiting, HEAD)
            tracker.peaks.clear()
            tracker.enter("prompts")
            _generation_step(network, cache, together, past=0, length=prompt)
            del waiting
            tracker.enter("tokens")
            logits = _generation_step(network, cache, rows, past=prompt + new_tokens - 1, length=1)
            tracker.enter("sampling", HEAD)
            sample_unchecked(logits, torch.zeros(rows, dtype=torch.float64), temperature=1.0)
        return dict(tracker.peaks)


def _generation_step(network: Any, cache: Any, rows: int, *, past: int, length: int) -> Tensor:
    cache.use(first_row=0, rows=rows, start=0, end=past)
    output = network(
        input_ids=torch.zeros(rows, length, dtype=torch.long),
        attention_mask=torch.ones(rows, past + length, dtype=torch.long),
        position_ids=torch.zeros(rows, length, dtype=torch.long),
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    return output.logits[:, -1]  # type: ignore[no-any-return]


def _vocabulary(network: Any) -> int:
    return int(network.get_output_embeddings().weight.shape[0])


def _logits_dtype(style: Style) -> torch.dtype:
    return torch.bfloat16 if style.autocast else style.compute_dtype or torch.float32


@contextmanager
def _linears_cast(network: nn.Module, style: Style, tracker: Tracker) -> Iterator[None]:
    """Give linear layers the forward of the generator's prepared weights, whose bytes are ours."""
    dtype = _logits_dtype(style)
    changed = [m for m in network.modules() if isinstance(m, nn.Linear | Conv1D)]
    for module in changed:
        weight = module.weight.detach().to(dtype)
        weight = weight.t() if isinstance(module, Conv1D) else weight
        tracker.forget(weight)
        module.forward = partial(_cast_linear, weight, module.bias)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for module in changed:
            del module.forward


def _cast_linear(weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    return linear(x.to(weight.dtype), weight, None if bias is None else bias.to(weight.dtype))
