"""Weights in the dtype of their base, and what is lost by it."""

from __future__ import annotations

import torch

from rlhf_lightning.models.rounding import rounded

BF16 = torch.bfloat16


def grid(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(BF16).float()


def test_tied_weights_stay_tied_and_integers_stay_whole():
    weight = grid(4, 4)
    made = rounded({"a": weight, "b": weight, "n": torch.tensor([3])}, BF16)
    assert made["a"].data_ptr() == made["b"].data_ptr()
    assert made["a"].dtype == BF16
    assert made["n"].dtype == torch.int64
    same = rounded({"a": weight}, torch.float32)
    assert same["a"] is weight
