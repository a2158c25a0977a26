"""Contexts of a model: eval mode, which dropout follows, and the drawing of new weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Put `model` into eval mode; afterwards every part of it is in the mode that it was in."""
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


@contextmanager
def drawing(seed: int) -> Iterator[None]:
    """Draw new weights on the CPU, from its generator: alike on every device and strategy.

    Lightning makes modules on the device of the run, where another generator gives other numbers.

    Args:
        seed: of the generator, which is as it was afterwards.
    """
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)  # torch's own function seeds every device
        yield
