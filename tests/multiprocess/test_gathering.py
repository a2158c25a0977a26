"""Gathering of sharded weights after Lightning has moved them to the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.builders.ranks import run_ranks

pytestmark = pytest.mark.timeout(120)
SCRIPT = str(Path(__file__).with_name("gather_stage.py"))


def test_a_model_that_was_moved_to_the_cpu_is_gathered_on_the_device_of_its_mesh(tmp_path):
    run_ranks(
        [SCRIPT, str(tmp_path)],
        world_size=2,
        folder=tmp_path,
        timeout=100,
    ).check()
    first, second = (torch.load(tmp_path / f"rank_{rank}.pt") for rank in range(2))
    assert torch.equal(first["weight"], torch.arange(12.0).reshape(6, 2))
    assert set(first) == {"weight", "bias", "tied"}
    assert first["tied"].data_ptr() == first["weight"].data_ptr(), "gathered and stored once"
    assert second == {}, "only rank 0 keeps what was gathered"
