"""Weights in the dtype of their base, and what is lost by it."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from rlhf_lightning.models.rounding import measure_rounding, rounded

BF16 = torch.bfloat16


def grid(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(BF16).float()


@pytest.mark.parametrize(("step", "low", "high"), [(1e-6, 0.0, 0.01), (1.0, 0.999, 1.001)])
def test_rounding_keeps_large_steps_and_falls_back_from_small_ones(tmp_path, step, low, high):
    before = grid(64, 64)
    save_file({"w": before.to(BF16)}, tmp_path / "model.safetensors")
    after = before + step * grid(64, 64).flip(0)
    found = measure_rounding({"w": after}, str(tmp_path), BF16, revision=None)
    assert found.kept is not None
    assert low <= found.kept <= high
    expected = (after.to(BF16).float() - after).norm() / after.norm()
    assert found.error == pytest.approx(float(expected), rel=1e-5)


def test_tied_weights_stay_tied_and_integers_stay_whole():
    weight = grid(4, 4)
    made = rounded({"a": weight, "b": weight, "n": torch.tensor([3])}, BF16)
    assert made["a"].data_ptr() == made["b"].data_ptr()
    assert made["a"].dtype == BF16
    assert made["n"].dtype == torch.int64
    same = rounded({"a": weight}, torch.float32)
    assert same["a"] is weight
