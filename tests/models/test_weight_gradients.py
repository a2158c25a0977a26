"""Embeddings and heads that add to `.grad` themselves."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rlhf_lightning.functional.linear_logprobs import linear_token_logprobs
from rlhf_lightning.models.weight_gradients import RowsEmbedding, hand_over

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
    for weight, how in ((plain, None), (handing, hand_over)):
        for _ in range(2):
            result = linear_token_logprobs(
                hidden, weight, tokens, temperature=0.7, with_entropy=True, hand_over=how
            )
            (result.logprobs.sum() + 0.3 * result.entropy.square().sum()).backward()
    torch.testing.assert_close(handing.grad, plain.grad, rtol=1e-5, atol=1e-6)


def test_large_gradients_in_bf16_are_added_in_parts_without_a_change():
    weight = nn.Parameter(torch.zeros(3000, 512))
    gradient = torch.randn(3000, 512).bfloat16()
    assert hand_over(weight, gradient) is None
    assert hand_over(weight, gradient) is None
    assert torch.equal(weight.grad, gradient.float() * 2)
