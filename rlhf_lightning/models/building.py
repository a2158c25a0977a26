"""Building of models that ranks share: one rank reads weights, a finished model is placed at once.

Factories ask here. Outside of `building_for` every process reads weights and places nothing.

Activation checkpointing is switched on here, too: a decoder layer's activations are computed again,
not kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, Protocol, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

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


_DROPOUTS = (
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout
)  # fmt: skip
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def checkpoint_activations(
    model: PreTrainedModel, contexts: Callable[[], Contexts] | None = None
) -> None:
    """Let every decoder layer of `model` keep its input alone for the backward pass.

    The layer runs once more in the backward pass: a third more computation for memory that no
    longer grows with the layers' insides. Results are the same to the bit. Only where a layer has
    dropout is the state of the random numbers kept for the repetition: of a GPU the host would read
    it for each layer.

    Args:
        model: a Hugging Face decoder, with or without a head, and with its adapters, if any.
        contexts: makes, in a layer's forward, the contexts of that forward and of its repetition.

    Source: Chen et al. 2016.
    """
    fields = (value for name, value in vars(model.config).items() if "drop" in name)
    modules = (module.p for module in model.modules() if isinstance(module, _DROPOUTS))
    drops = any(isinstance(p, int | float) and p > 0 for p in (*fields, *modules))
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": drops}
    if contexts is not None:
        options["context_fn"] = contexts
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
    else:  # its name before transformers 5.23
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
