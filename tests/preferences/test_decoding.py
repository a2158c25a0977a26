"""Top-k and top-p against transformers, by counting samples, and grids."""

from __future__ import annotations

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from rlhf_lightning.preferences.candidates import grid, truncate
from rlhf_lightning.rollout.noise import sample


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 0.9), (5, 1.0), (7, 0.5), (0, 0.05), (0, 1.0)])
def test_what_is_left_is_what_transformers_leaves(temperature, top_k, top_p) -> None:
    logits = torch.randn(64, 50, generator=torch.Generator().manual_seed(3)) * 3
    expected = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(None, expected)
    found = truncate(logits, temperature=temperature, top_k=top_k, top_p=top_p)
    assert torch.equal(found.isfinite(), expected.isfinite())
    kept = found.isfinite()
    assert torch.equal(found[kept], logits[kept])
    assert kept.any(-1).all()


def test_samples_follow_the_truncated_distribution() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]]).expand(20_000, -1)
    uniform = torch.rand(20_000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    kept = truncate(logits, temperature=0.8, top_k=0, top_p=0.9)
    tokens, logprobs, _ = sample(kept, uniform, temperature=0.8)
    weights = torch.softmax(torch.tensor([2.0, 1.0]) / 0.8, -1)
    torch.testing.assert_close(logprobs.exp(), weights[tokens], msg="those of what was drawn from")
    counts = torch.bincount(tokens, minlength=4) / 20_000
    assert counts[2:].sum() == 0
    assert counts[:2].tolist() == pytest.approx(weights.tolist(), abs=0.01)


def test_a_grid_is_every_combination() -> None:
    settings = grid({"temperature": [0.7, 1.0], "top_p": [0.9, 1.0]})
    assert [d.settings for d in settings] == [
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 0.7, "top_p": 1.0},
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 1.0, "top_p": 1.0},
    ]
    assert grid({"top_k": [20]})[0].settings == {"temperature": 1.0, "top_p": 1.0, "top_k": 20}
