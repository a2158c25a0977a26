"""What is faster on CUDA against what is plain: within twice the distance of bf16 from fp32."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from rlhf_lightning.models.compute_copies import compute_copies
from rlhf_lightning.models.gpu_kernels import fuse_layers, fused_parts, gpu_kernels
from rlhf_lightning.models.heads import PolicyModel
from rlhf_lightning.models.precision import in_precision
from rlhf_lightning.rollout.generators.base import CachedGenerator
from rlhf_lightning.rollout.generators.captured import CapturedGenerator
from rlhf_lightning.rollout.noise import RowNoise
from tests.builders.models import PAD, prompt_batch, prompt_rows

DEVICE = "cuda"
ROWS, WIDTH, WORDS = 8, 96, 640
LLAMAS = ("llama", "mistral", "qwen2", "qwen3")
SIZES = {
    "vocab_size": WORDS,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "initializer_range": 0.1,  # log-probabilities that differ
}
Context = AbstractContextManager[Any]
has_liger = pytest.mark.skipif(
    importlib.util.find_spec("liger_kernel") is None, reason="needs liger-kernel"
)


def policy_of(model_type: str) -> PolicyModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **SIZES)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return PolicyModel(model.to(DEVICE).train())


def fused(liger: bool) -> Callable[[PolicyModel], Context]:
    def fuse(policy: PolicyModel) -> Context:
        fuse_layers(policy.model, liger=liger)
        assert fused_parts(policy)
        return nullcontext()

    return fuse


def all_together(policy: PolicyModel) -> Context:
    fuse_layers(policy.model, liger=importlib.util.find_spec("liger_kernel") is not None)
    together = ExitStack()
    together.enter_context(gpu_kernels("auto"))
    together.enter_context(compute_copies(policy, devices=(DEVICE,)))
    return together


PATHS: dict[str, Callable[[PolicyModel], Context]] = {
    "copies": lambda policy: compute_copies(policy, devices=(DEVICE,)),
    "fused layers": fused(liger=False),
    "Liger": fused(liger=True),
    "compiled head": lambda policy: gpu_kernels("auto"),
    "all together": all_together,
}


def updated(
    policy: PolicyModel, precision: str, path: Callable[[PolicyModel], Context]
) -> dict[str, Tensor]:
    """Return log-probabilities, entropies and gradients of two micro-batches."""
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(3, WORDS, (2, ROWS, WIDTH), generator=draw).to(DEVICE)
    positions = torch.arange(ROWS * WIDTH, device=DEVICE).view(ROWS, WIDTH)[:, 40:-1].flatten()
    scale = torch.randn(2, len(positions), generator=draw).to(DEVICE)
    found = {}
    # Without `auto` the head is not compiled.
    with gpu_kernels("torch"), in_precision(precision, torch.device(DEVICE)), path(policy):
        for batch, weights in enumerate(scale):
            tokens = ids[batch].flatten()[positions + 1]
            got = policy(ids[batch], positions, tokens, 0.7, True)
            assert got.entropy is not None
            (got.logprobs * weights + 0.1 * got.entropy).sum().backward()
            found |= {f"logprobs {batch}": got.logprobs, f"entropy {batch}": got.entropy}
    found |= {name: weight.grad for name, weight in policy.named_parameters()}
    return {name: value.detach().float() for name, value in found.items()}


@pytest.mark.gpu
@pytest.mark.parametrize("model_type", LLAMAS)
@pytest.mark.parametrize(
    "path", [pytest.param(name, marks=has_liger if name == "Liger" else ()) for name in PATHS]
)
def test_an_update_by_a_fast_path_is_as_near_to_the_plain_one_as_bf16_is_to_fp32(path, model_type):
    exact, plain = (
        updated(policy_of(model_type), precision, lambda _: nullcontext())
        for precision in ("32-true", "bf16-mixed")
    )
    fast = updated(policy_of(model_type), "bf16-mixed", PATHS[path])
    assert fast.keys() == plain.keys() == exact.keys()
    for name, value in plain.items():
        distance = (value - exact[name]).norm()
        assert distance > 0
        assert (fast[name] - value).norm() <= 2 * distance, name


@pytest.mark.gpu
@pytest.mark.parametrize("model_type", LLAMAS)
def test_captured_decoding_is_as_near_to_the_eager_loop_as_bf16_is_to_fp32(model_type):
    policy = policy_of(model_type)
    prompts = prompt_batch(prompt_rows([12, 5, 9, 3, 12, 7, 8, 2], seed=3)).to(DEVICE)

    width = prompts.input_ids.shape[1]

    def written(engine: Any, precision: str) -> Any:
        with in_precision(precision, torch.device(DEVICE)), policy.generating() as model:
            return engine(model, prompts, noise=RowNoise(1), temperature=1.0, max_new_tokens=64)

    def difference(one: Any, other: Any) -> Tensor:
        """Return that of log-probabilities of the same tokens behind the same ones."""
        same = (one.sequences == other.sequences)[:, width:].long().cumprod(1).bool()
        assert same.sum() >= 2 * len(prompts)
        return (one.logprobs - other.logprobs)[same].abs().mean()

    eager, captured = CachedGenerator((), PAD), CapturedGenerator((), PAD, capture=True)
    plain = written(eager, "bf16-mixed")
    distance = difference(plain, written(eager, "32-true"))
    assert difference(plain, written(captured, "bf16-mixed")) <= 2 * distance
