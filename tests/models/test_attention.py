from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM

from rlhf_lightning.models.cpu.attention import NAME, short_attention
from tests.builders.models import MODEL_TYPES, tiny_policy


class Module(torch.nn.Module):
    is_causal = True
    num_key_value_groups = 3


def inputs(
    rows: int = 2, positions: int = 24, heads: int = 6, groups: int = 2
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(positions)
    shapes = [(rows, n, positions, 16) for n in (heads, groups, groups)]
    return tuple(torch.randn(s, generator=generator).bfloat16().requires_grad_() for s in shapes)


def exact(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    repeat = query.shape[1] // key.shape[1]
    key, value = (x.double().repeat_interleave(repeat, 1) for x in (key, value))
    return scaled_dot_product_attention(query.double(), key, value, is_causal=True).transpose(1, 2)


@pytest.mark.parametrize("positions", [2, 8, 40])
@pytest.mark.parametrize("heads", [2, 6])
def test_values_and_gradients_are_causal_attention_within_bf16(positions, heads):
    tensors = inputs(positions=positions, heads=heads)
    got, _ = short_attention(Module(), *tensors, None)
    wanted = exact(*tensors)
    assert got.dtype == torch.bfloat16
    assert got.shape == wanted.shape
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=0.02)
    gradient = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(0))
    ours = torch.autograd.grad((got * gradient).sum(), tensors)
    theirs = torch.autograd.grad((wanted * gradient).sum(), tensors)
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine - other).float().norm() / other.float().norm() < 0.01


@pytest.mark.parametrize("kind", MODEL_TYPES)
def test_models_use_it_and_their_exports_do_not_name_it(kind, tmp_path):
    policy = tiny_policy(kind)
    assert policy.model.config._attn_implementation == NAME
    policy.model.save_pretrained(tmp_path)
    assert NAME not in (tmp_path / "config.json").read_text()
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.arange(2, 34).reshape(2, 16)
    with torch.autocast("cpu", torch.bfloat16):
        ours = policy(ids, torch.arange(30), torch.arange(3, 33)).logprobs
        theirs = plain(ids).logits.float().log_softmax(-1).flatten(0, 1)[:30]
    theirs = theirs.gather(1, torch.arange(3, 33)[:, None])[:, 0]
    assert (ours - theirs).abs().max() < 0.15  # two bf16 computations of the same thing
    assert (ours - theirs).abs().mean() < 0.03
