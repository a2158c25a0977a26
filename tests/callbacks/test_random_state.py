from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rlhf_lightning.callbacks.exact_resume import RandomState


def draws() -> list[float]:
    numbers = [random.random(), random.gauss(0, 1), float(np.random.rand())]
    return [*numbers, float(np.random.randn()), torch.rand(()).item(), torch.randn(()).item()]


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)
    draws()  # leaves the second of a pair of normal numbers behind


def saved_by(world_size: int) -> dict[str, Any]:
    """Return a checkpoint with the states of ranks that were seeded with 1, 2, ..."""
    each = []
    for number in range(world_size):
        seed(number + 1)
        alone: dict[str, Any] = {}
        RandomState().on_save_checkpoint(_trainer(0, 1), None, alone)  # type: ignore[arg-type]
        ((key, state),) = alone.items()
        each.append(state)
    return {key: {name: torch.cat([state[name] for state in each]) for name in each[0]}}


def _trainer(rank: int, world_size: int) -> Any:
    return SimpleNamespace(global_rank=rank, world_size=world_size)


def resume(checkpoint: dict[str, Any], trainer: Any, module: Any = None) -> None:
    callback = RandomState()
    callback.on_load_checkpoint(trainer, module, checkpoint)
    callback.on_train_start(trainer, module)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_each_rank_goes_on_from_its_own_random_state(rank):
    checkpoint = saved_by(3)
    seed(rank + 1)
    expected = draws()
    seed(99)
    assert draws() != expected
    resume(checkpoint, _trainer(rank, 3))
    assert draws() == expected


def test_another_number_of_ranks_is_told(caplog):
    checkpoint = saved_by(2)
    resume(checkpoint, _trainer(3, 4))
    assert "written by 2 processes, this run has 4" in caplog.text
    seed(5)
    expected = draws()
    seed(5)
    resume(checkpoint, _trainer(3, 4))
    assert draws() == expected, "rank 3 of 4 would drop what rank 1 drops"
