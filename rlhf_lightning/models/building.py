"""Building of models that ranks share: one rank reads weights, a finished model is placed at once.

Factories ask here. Outside of `building_for` every process reads weights and places nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol, TypeVar

import torch
from torch import nn

ModelT = TypeVar("ModelT", bound=nn.Module)


class Ranks(Protocol):
    """The ranks that build the same models together."""

    reads_weights: bool  # of this rank; the others build on the meta device

    def place(self, root: nn.Module, *, frozen: bool) -> None:
        """Shard a model with the weights that were read."""


_RANKS: ContextVar[Ranks | None] = ContextVar("ranks", default=None)


@contextmanager
def building_for(ranks: Ranks) -> Iterator[None]:
    """Build models inside for `ranks`."""
    token = _RANKS.set(ranks)
    try:
        yield
    finally:
        _RANKS.reset(token)


def reads_weights() -> bool:
    """Return whether this process reads weights; another one builds on the meta device."""
    ranks = _RANKS.get()
    return ranks is None or ranks.reads_weights


def place_on_ranks(root: ModelT, *, frozen: bool = False) -> ModelT:
    """Shard `root` if ranks share it, and return it: nothing may be added to it afterwards."""
    ranks = _RANKS.get()
    if ranks is not None:
        ranks.place(root, frozen=frozen)
    return root


@contextmanager
def seeded_init(seed: int) -> Iterator[None]:
    """Draw new weights inside from `seed`, the same on every device; none on the meta device.

    The CPU's generator is used: a GPU's draws other numbers.
    """
    place = torch.get_default_device() if reads_weights() else torch.device("meta")
    place = place if place.type == "meta" else torch.device("cpu")
    with torch.random.fork_rng(devices=[]), place:
        torch.default_generator.manual_seed(seed)
        yield


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
