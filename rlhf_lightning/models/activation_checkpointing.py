"""Activation checkpointing: a decoder layer's activations are computed again, not kept."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from transformers import PreTrainedModel

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
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": _has_dropout(model)}
    if contexts is not None:
        options["context_fn"] = contexts
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
    else:  # its name before transformers 5.23
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)


def _has_dropout(model: PreTrainedModel) -> bool:
    """Return whether anything is dropped, by a field of the configuration or by a module."""
    fields = (value for name, value in vars(model.config).items() if "drop" in name)
    modules = (module.p for module in model.modules() if isinstance(module, _DROPOUTS))
    return any(isinstance(p, int | float) and p > 0 for p in (*fields, *modules))
