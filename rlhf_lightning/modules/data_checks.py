"""Refuse data on which a module would fail late, or train on something else in silence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from rlhf_lightning.data.datamodules import (
    DemonstrationDataModule,
    PreferenceDataModule,
    PromptDataModule,
)
from rlhf_lightning.data.record_datamodule import RecordDataModule
from rlhf_lightning.models.classifiers import max_positions

FITTING: dict[str, type[RecordDataModule]] = {
    "sft": DemonstrationDataModule,
    "reward": PreferenceDataModule,
    "dpo": PreferenceDataModule,
    "ppo": PromptDataModule,
    "grpo": PromptDataModule,
}


def check_data(module: Any, data: Any) -> None:
    """Check that a module can train on the data of a DataModule of ours; others are not checked.

    Args:
        module: whose models are built.
        data: the Trainer's DataModule; None where it was given a loader.

    Raises:
        TypeError: if the data are records of another kind.
        ValueError: if their tokenizer is not the module's, or the rows may be longer than the
            model's context.
    """
    fitting = FITTING.get(getattr(module, "stage", ""))
    if fitting is None or not isinstance(data, RecordDataModule):
        return
    kinds = getattr(module, "record_kinds", fitting.kinds)
    if data.kind not in kinds:
        raise TypeError(
            f"{type(module).__name__} trains on {' or '.join(kinds)}, and "
            f"{type(data).__name__} gives {data.kind}: give a {fitting.__name__} of kind={kinds[0]}"
        )
    _check_tokenizer(module, data)
    _check_context(module, data)


def check_batch(module: Any, batch: object, expected: type) -> None:
    """Check the type of a batch.

    Raises:
        TypeError: if it is another one.
    """
    if not isinstance(batch, expected):
        fitting = FITTING[module.stage].__name__
        raise TypeError(
            f"{type(module).__name__} was given a batch that is {type(batch).__name__}, expected "
            f"{expected.__name__}: give the Trainer a {fitting}, by fit(module, datamodule=...)"
        )


def _check_tokenizer(module: Any, data: RecordDataModule) -> None:
    own, theirs = getattr(module, "tokenizer", None), data.tokenizer
    if own is None or own is theirs:
        return
    if len(own) != len(theirs) or own.get_vocab() != theirs.get_vocab():
        raise ValueError(
            f"{type(data).__name__} has another tokenizer ({len(theirs)} tokens) than "
            f"{type(module).__name__} ({len(own)} tokens), whose ids would mean other words: give "
            f"{type(data).__name__}(..., module.tokenizer)"
        )


def _check_context(module: Any, data: RecordDataModule) -> None:
    limits = [limit for model in _models(module) if (limit := max_positions(model)) is not None]
    name = "max_prompt_length" if isinstance(data, PromptDataModule) else "max_length"
    asked = {f"{type(data).__name__}.{name}": data.max_length}
    if isinstance(data, PromptDataModule):
        asked["SamplingHparams.max_new_tokens"] = module.sampling.max_new_tokens
    total = sum(asked.values())
    if limits and total > min(limits):
        given = " + ".join(f"{key}={value}" for key, value in asked.items())
        summed = f" = {total}" if len(asked) > 1 else ""
        raise ValueError(
            f"{given}{summed} tokens are more than the model's context of {min(limits)} "
            f"(max_position_embeddings): lower {' or '.join(asked)}"
        )


def _models(module: Any) -> Iterator[PreTrainedModel]:
    """Yield the models whose weights are trained, or that adapters are trained on."""
    for name in ("policy", "model", "value"):
        root = getattr(getattr(module, name, None), "root", None)
        if isinstance(root, nn.Module):
            yield from (part for part in root.modules() if isinstance(part, PreTrainedModel))
