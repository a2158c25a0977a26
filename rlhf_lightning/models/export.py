"""Exports: a policy or a reward model as a folder that plain transformers loads."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForSequenceClassification,
    GenerationConfig,
    PreTrainedTokenizerBase,
)

from rlhf_lightning.models.heads import PolicyModel, ScalarHeadModel
from rlhf_lightning.models.loading import NORMALIZATION
from rlhf_lightning.models.rounding import BASE_DTYPE, KEPT, rounded
from rlhf_lightning.models.transformers_4 import with_old_keys, write_json


def complete_config(
    file: Path,
    model: PolicyModel | ScalarHeadModel,
    dtype: torch.dtype,
    base_dtype: torch.dtype,
    kept: float | None = None,
) -> None:
    """Write into config.json the dtypes of an export, and the keys of transformers 4.

    Args:
        file: config.json of the export.
        model: that is exported.
        dtype: of its weights.
        base_dtype: of the model at the root.
        kept: the part of a merged adapter that bf16 keeps; None without one.
    """
    content = json.loads(file.read_text(encoding="utf-8"))
    content["dtype"] = str(dtype).removeprefix("torch.")
    if base_dtype != torch.float32:
        content[BASE_DTYPE] = str(base_dtype).removeprefix("torch.")
    content.pop(KEPT, None)  # of the model before
    content |= {} if kept is None else {KEPT: kept}
    config = model.model.config if isinstance(model, PolicyModel) else model.trunk.config
    write_json(file, with_old_keys(content, type(config).from_dict(copy.deepcopy(content))))


def weights_by_file_name(
    model: PolicyModel | ScalarHeadModel, state: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the weights that an export rounds, by their names in its files: no scalar head."""
    if isinstance(model, PolicyModel):
        return {k.removeprefix("model."): v for k, v in state.items()}
    prefix = f"{model.trunk.base_model_prefix}."
    trunk = {k: v for k, v in state.items() if k.startswith("trunk.")}
    return {prefix + k.removeprefix("trunk."): v for k, v in trunk.items()}


def export_policy(
    policy: PolicyModel,
    folder: Path,
    state: Mapping[str, Tensor],
    *,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Write the policy as a Hugging Face causal LM in safetensors.

    Args:
        policy: policy whose architecture is written.
        folder: target folder, created if missing.
        state: full state dict of `policy`.
        dtype: dtype of the written weights.
    """
    weights = rounded(weights_by_file_name(policy, state), dtype)
    policy.model.save_pretrained(folder, state_dict=weights)


def generation_settings(
    policy: PolicyModel, tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int]
) -> GenerationConfig:
    """Return the base model's generation settings with the stop ids the policy was trained with."""
    settings: Any = copy.deepcopy(policy.model.generation_config)
    stops = sorted({int(i) for i in stop_ids})
    settings.eos_token_id = stops[0] if len(stops) == 1 else stops
    settings.pad_token_id = tokenizer.pad_token_id
    return settings  # type: ignore[no-any-return]


def export_scalar_model(
    model: ScalarHeadModel,
    folder: Path,
    state: Mapping[str, Tensor],
    *,
    pad_token_id: int,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Write a reward model as a Hugging Face sequence classifier with one label.

    The head's bias, which such classifiers do not have, is written to config.json as
    `reward_offset`; `load_scalar_model` adds it. `reward_normalized` says whether scores have mean
    0 and standard deviation 1. Two more keys there keep readers from putting the
    score through a sigmoid: `problem_type` is for pipelines of transformers and vLLM's classify,
    `sentence_transformers` for CrossEncoder and vLLM's score.

    Args:
        model: model whose architecture is written.
        folder: target folder, created if missing.
        state: full state dict of `model`.
        pad_token_id: the classifier reads its score at the last token that is not this one, so
            it must not be EOS. The first id behind the vocabulary gets a row of zeros, which only
            padding reads.
        dtype: dtype of the written weights; the head stays in fp32.

    Raises:
        RuntimeError: if `state` is not that of a decoder with a scalar head.
    """
    state = dict(state)
    embedding = f"trunk.{_input_embedding(model)}.weight"
    state[embedding] = with_row_for(state[embedding], pad_token_id)
    config = type(model.trunk.config).from_dict(model.trunk.config.to_dict())
    config.num_labels, config.pad_token_id = 1, pad_token_id
    config.vocab_size = len(state[embedding])
    config.reward_offset = float(state["head.bias"])
    config.reward_normalized = model.normalized
    config.problem_type = "regression"
    config.sentence_transformers = {"activation_fn": "torch.nn.modules.linear.Identity"}
    for name in NORMALIZATION:  # of the model before, which are in the head by now
        vars(config).pop(name, None)
    with torch.device("meta"):  # the weights are those of `state`: no second copy
        classifier = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    weights = rounded(weights_by_file_name(model, state), dtype)
    weights["score.weight"] = state["head.weight"].float()
    classifier.load_state_dict(weights, assign=True)
    classifier.save_pretrained(folder)


def with_row_for(embedding: Tensor, token_id: int) -> Tensor:
    """Return `[V, H]` input embeddings in which `token_id` has a row: zeros, if it is new."""
    missing = token_id + 1 - len(embedding)
    if missing <= 0:
        return embedding
    return torch.cat([embedding, embedding.new_zeros(missing, embedding.shape[1])])


def _input_embedding(model: ScalarHeadModel) -> str:
    embedding = model.trunk.get_input_embeddings()
    return next(name for name, module in model.trunk.named_modules() if module is embedding)
