"""Refuse data on which a module would fail late, or train on something else in silence."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from rlhf_lightning.data.datamodules import (
    DemonstrationDataModule,
    PreferenceDataModule,
    PromptDataModule,
)
from rlhf_lightning.data.first_screen import warn_of_cut_responses
from rlhf_lightning.data.record_datamodule import RecordDataModule
from rlhf_lightning.distributed.collectives import whole
from rlhf_lightning.models.classifiers import max_positions
from rlhf_lightning.text.decoding import token_names

logger = logging.getLogger(__name__)

DEAD_ROW = 1e-3  # of the median norm

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
        ValueError: if their tokenizer is not the module's, if the rows may be longer than the
            model's context, or if they hold a token that it has no embedding for.
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
    if isinstance(data, PromptDataModule):
        longest, key = module.sampling.max_new_tokens, "sampling.max_new_tokens"
        warn_of_cut_responses(data.source, "train", data.tokenizer, longest, key=key)
    for model in _models(module):
        check_token_rows(model, data.tokenizer, data.token_ids())
        break  # policy, value and reward model read the same ids


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


@torch.no_grad()
def check_token_rows(model: Any, tokenizer: Any, used: Collection[int]) -> None:
    """Check that a model has an embedding for every token of the data, and name untrained ones.

    Added tokens of a base model, such as those of a chat template, may have rows that nobody has
    trained: (nearly) 0, or the same as that of another one. The first gradients are then huge.

    Args:
        model: of transformers.
        tokenizer: of the data.
        used: ids of the data.

    Raises:
        ValueError: if there is no embedding for one of them.
    """
    weight = model.get_input_embeddings().weight
    if beyond := sorted(i for i in used if i >= len(weight)):
        raise ValueError(
            f"the data hold {token_names(beyond, tokenizer)} (id {beyond[0]} and up), and "
            f"{type(model).__name__} has {len(weight)} embeddings: call "
            f"resize_token_embeddings({len(tokenizer)}) on the model and save it, or take the "
            "tokenizer that it was published with"
        )
    added = sorted(set(used) & set(tokenizer.added_tokens_decoder) - {tokenizer.pad_token_id})
    size, total = (whole(each.float()) for each in (weight.norm(dim=1), weight.sum(dim=1)))
    rows = list(zip(size.tolist(), total.tolist(), strict=True))
    times = Counter(rows)
    least = DEAD_ROW * float(size.median())
    dead = [i for i in added if rows[i][0] <= least or times[rows[i]] > 1]
    if dead:
        logger.warning(
            "nobody has trained the embeddings of %s, which the data hold: they are 0 or equal to "
            "others, and the first gradients may be a hundred times the later ones. Start from a "
            "model that knows these tokens, or set their rows to the mean of the others",
            token_names(dead, tokenizer),
        )


def _models(module: Any) -> Iterator[PreTrainedModel]:
    """Yield the models whose weights are trained, or that adapters are trained on."""
    for name in ("policy", "model", "value"):
        root = getattr(getattr(module, name, None), "root", None)
        if isinstance(root, nn.Module):
            yield from (part for part in root.modules() if isinstance(part, PreTrainedModel))
