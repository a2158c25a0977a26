"""Exports: a policy or a reward model as a folder that plain transformers loads.

Transformers 5 moved the base and the scaling of rotary angles into `rope_parameters`, renamed a few
sizes and the class of a tokenizer that is all in tokenizer.json. Older readers, which servers and
converters use, would silently take their defaults for them: the folder has the old keys, too.
"""

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
    PretrainedConfig,
    PreTrainedTokenizerBase,
)

from rlhf_lightning.models.heads import PolicyModel, ScalarHeadModel
from rlhf_lightning.models.loading import NORMALIZATION
from rlhf_lightning.models.precision import BASE_DTYPE, KEPT, rounded
from rlhf_lightning.runs.atomic import write_text


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
    read = model.trunk.get_input_embeddings()
    name = next(name for name, module in model.trunk.named_modules() if module is read)
    embedding = f"trunk.{name}.weight"
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


# Of model types that called them otherwise.
_OLD_NAMES = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
_BESIDE_SCALING = ("rope_theta", "partial_rotary_factor")
_FULL, _SLIDING = "full_attention", "sliding_attention"


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Write the content of a configuration file as transformers does."""
    write_text(file, json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n")


def with_old_keys(content: Mapping[str, Any], config: PretrainedConfig) -> dict[str, Any]:
    """Return the content of config.json with the keys of transformers 4.

    Args:
        content: content of config.json, or the part of a model within it.
        config: the configuration that was written there.
    """
    parts = {
        name: with_old_keys(value, getattr(config, name))
        for name, value in content.items()
        if isinstance(getattr(config, name, None), PretrainedConfig)
    }
    named = {**content, **parts}
    names = {old: named[new] for old, new in config.attribute_map.items() if new in named}
    old = {**names, **_old_rope(named.get("rope_parameters") or {}, named)}
    if "dtype" in named:
        old["torch_dtype"] = named["dtype"]
    for unread in ((), ("rope_scaling",)):
        # Today's transformers prefers `rope_scaling`: it has to say the same.
        found = {k: v for k, v in old.items() if k not in unread} | named
        if _rope(type(config).from_dict(copy.deepcopy(found))) == _rope(config):
            break
    return found


def _rope(config: PretrainedConfig) -> Any:
    """Return `rope_parameters` without what a reader repeats there: the type, a known factor."""
    first = getattr(config, "original_max_position_embeddings", None)
    factor = config.max_position_embeddings / first if first else None

    def own(value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        return {
            k: own(v) for k, v in value.items() if k != "type" and (k != "factor" or v != factor)
        }

    return own(getattr(config, "rope_parameters", None))


def _old_rope(rope: Mapping[str, Any], content: Mapping[str, Any]) -> dict[str, Any]:
    if _FULL in rope:
        local = (rope.get(_SLIDING) or {}).get("rope_theta")
        full = _old_rope(rope[_FULL] or {}, content)
        return full | ({} if local is None else {"rope_local_base_freq": local})
    if "rope_theta" not in rope:  # none, or nested by layers that transformers 4 does not know
        return {}
    found: dict[str, Any] = {name: rope[name] for name in _BESIDE_SCALING if name in rope}
    if str(content.get("model_type")).startswith("gpt_neox"):
        found = {_OLD_NAMES[name]: value for name, value in found.items()}
    kind = rope.get("rope_type", "default")
    scaling = {k: v for k, v in rope.items() if k not in _BESIDE_SCALING}
    if kind == "longrope" and "original_max_position_embeddings" in content:
        # Phi 3 takes these three and no more.
        scaling = {k: scaling[k] for k in scaling if k.endswith("_factor") and "att" not in k}
        scaling["type"] = kind
    elif kind != "default":
        scaling["type"] = kind
    found["rope_scaling"] = None if kind == "default" else scaling
    return found


def name_old_tokenizer(folder: Path) -> None:
    """Give the tokenizer in `folder` the names that transformers 4 knows, which 5 reads alike."""
    file = folder / "tokenizer_config.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    if content.get("tokenizer_class") == "TokenizersBackend":
        content["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(content.get("extra_special_tokens"), list):
        content["additional_special_tokens"] = content.pop("extra_special_tokens")
    for ours in ("is_local", "local_files_only"):  # of the folder that it was loaded from
        content.pop(ours, None)
    write_json(file, content)
