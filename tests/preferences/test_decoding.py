"""Top-k and top-p against transformers, by counting samples, and grids."""

from __future__ import annotations

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from rlhf_lightning.preferences.candidates import truncate


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
