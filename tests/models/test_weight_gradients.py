"""Embeddings and heads that add to `.grad` themselves."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rlhf_lightning.functional.linear_logprobs import linear_token_logprobs
from rlhf_lightning.models.cpu import weight_grads
from rlhf_lightning.models.cpu.weight_grads import RowsEmbedding, accumulate_weight_grad

IDS = torch.tensor([[3, 1, 3, 0], [2, 2, 2, 5]])


@pytest.mark.parametrize("padding_idx", [None, 0])
def test_an_embeddings_gradient_is_the_dense_one_over_several_backwards(padding_idx):
    plain = nn.Embedding(7, 5, padding_idx=padding_idx)
    rows = RowsEmbedding(7, 5, padding_idx=padding_idx)
    rows.load_state_dict(plain.state_dict())
    for scale in (1.0, -2.0):
        for module in (plain, rows):
            out = module(IDS)
            (out * scale * torch.arange(40.0).view(2, 4, 5)).sum().backward()
    torch.testing.assert_close(rows.weight.grad, plain.weight.grad)
    assert (rows.weight.grad[3] != 0).any()


def test_a_head_that_hands_over_has_the_gradients_of_one_that_does_not():
    torch.manual_seed(0)
    hidden, tokens = torch.randn(48, 6), torch.randint(0, 11, (48,))
    plain, handing = (nn.Parameter(torch.randn(11, 6).sin()) for _ in range(2))
    handing.data.copy_(plain.data)
    for weight, how in ((plain, None), (handing, accumulate_weight_grad)):
        for _ in range(2):
            result = linear_token_logprobs(
                hidden, weight, tokens, temperature=0.7, with_entropy=True, accumulate=how
            )
            (result.logprobs.sum() + 0.3 * result.entropy.square().sum()).backward()
    torch.testing.assert_close(handing.grad, plain.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("instruction", [True, False])  # of the processor, for products of bf16
def test_a_large_gradient_is_the_product_whatever_the_blocks(dtype, instruction, monkeypatch):
    monkeypatch.setattr(weight_grads, "multiplies_bf16", lambda: instruction)
    rows, words = 48, 20_000  # 39 MiB: two blocks of many parts
    weight = nn.Parameter(torch.zeros(words, 512))
    grad, inputs = (torch.randn(rows, size).to(dtype) for size in (words, 512))
    wide = dtype if instruction else torch.float32  # which is not rounded before it is added
    expected = (grad.to(wide).T @ inputs.to(wide)).float()
    for times in (1, 2):
        assert accumulate_weight_grad(weight, grad, inputs) is None
        torch.testing.assert_close(weight.grad, expected * times, rtol=1e-5, atol=1e-5)


def test_a_matrix_that_others_look_at_is_left_to_autograd():
    weight = nn.Parameter(torch.zeros(3, 2))
    weight.register_hook(lambda gradient: gradient)
    grad, inputs = torch.randn(5, 3), torch.randn(5, 2)
    torch.testing.assert_close(accumulate_weight_grad(weight, grad, inputs), grad.T @ inputs)
    assert weight.grad is None
    assert accumulate_weight_grad(weight.requires_grad_(False), grad, inputs) is None
