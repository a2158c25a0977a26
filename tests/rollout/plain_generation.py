"""Tiny models of many architectures, and the tokens they give without anything clever."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rlhf_lightning.rollout.generators.base import CachedGenerator
from rlhf_lightning.rollout.noise import RowNoise, sample
from tests.builders.models import EOS, LLAMA_LIKE, PAD, VOCABULARY, prompt_rows, tiny_policy

ROWS = prompt_rows([3, 8, 1, 5, 8, 2, 7, 4, 6, 3, 1, 8])
STOPS = (EOS, *range(42, VOCABULARY))
NOISE = RowNoise(seed=7, iteration=3)
WINDOW = 5  # shorter than most prompts and than what follows them

SHAPE = LLAMA_LIKE | {"head_dim": 16}
_MIXED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
OTHER_MODELS = {
    "gemma3_text": _MIXED,
    "qwen3": _MIXED | {"use_sliding_window": True},
    "mistral": {"sliding_window": WINDOW},
    "phi3": {"sliding_window": WINDOW},
}


def other_model(model_type: str):
    config = AutoConfig.for_model(model_type, **(SHAPE | OTHER_MODELS[model_type]))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def tiny(model_type: str = "llama", **changes):
    return tiny_policy(model_type, **changes).model.eval()


def generated(
    model, prompts, *, temperature: float = 0.9, max_new_tokens: int = 14, engine=CachedGenerator
):
    """Return each row's response ids by its row id."""
    result = engine(STOPS, PAD)(
        model, prompts, noise=NOISE, temperature=temperature, max_new_tokens=max_new_tokens
    )
    width = prompts.input_ids.shape[1]
    assert torch.equal(result.sequences[:, :width], prompts.input_ids)
    body = result.sequences[:, width:]
    rows = [ids[mask].tolist() for ids, mask in zip(body, result.response_mask, strict=True)]
    return dict(zip(prompts.row_ids.tolist(), rows, strict=True))


def without_cache(model, rows, *, temperature: float = 0.9, max_new_tokens: int = 14):
    """Return what a full forward for every token of every row gives: nothing clever."""
    responses = {}
    for row, prompt in enumerate(rows):
        ids = list(prompt)
        for t in range(max_new_tokens):
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[:, -1]
            uniform = NOISE.uniform(torch.tensor([row]), t)
            ids.append(int(sample(logits, uniform, temperature=temperature).tokens))
            if ids[-1] in STOPS:
                break
        responses[row] = ids[len(prompt) :]
    return responses


@contextmanager
def recorded_forwards(model) -> Iterator[list[torch.Size]]:
    """Yield the shapes `[rows, new tokens]` of the model's forwards."""
    shapes: list[torch.Size] = []
    hook = model.register_forward_pre_hook(
        lambda _, __, kwargs: shapes.append(kwargs["input_ids"].shape), with_kwargs=True
    )
    try:
        yield shapes
    finally:
        hook.remove()
