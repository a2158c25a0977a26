"""Factories: a policy or a scalar model from a folder, a hub name, or a config from scratch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)

from rlhf_lightning.models.heads import PolicyModel, ScalarHeadModel, scalar_head

ModelT = TypeVar("ModelT", bound=nn.Module)
_LOADING: dict[str, Any] = {"trust_remote_code": False, "use_safetensors": True}


def set_dropout(config: PretrainedConfig, probability: float) -> PretrainedConfig:
    """Set every dropout field of `config`; fields reach functional dropout, modules do not."""
    for name, value in vars(config).items():
        if "drop" in name and isinstance(value, int | float) and not isinstance(value, bool):
            setattr(config, name, probability)
    return config


def load_policy(
    source: str | Path | None = None,
    *,
    from_scratch: Mapping[str, Any] | None = None,
    dropout: float = 0.0,
    seed: int = 0,
) -> PolicyModel:
    """Return a trainable causal language model with fp32 weights and its dropout set.

    Args:
        source: folder or hub name of a Hugging Face checkpoint in safetensors.
        from_scratch: fields of a config (with `model_type`) for a model with random weights.
        dropout: probability for every dropout of the config; 0 in RLHF.
        seed: of the random weights.

    Raises:
        ValueError: unless exactly one of `source` and `from_scratch` is given.
    """
    if (source is None) == (from_scratch is None):
        raise ValueError("give exactly one of source and from_scratch to load_policy")
    if from_scratch is not None:
        config = set_dropout(AutoConfig.for_model(**from_scratch), dropout)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    else:
        config = _config(source, dropout)
        model = AutoModelForCausalLM.from_pretrained(
            str(source), config=config, dtype=torch.float32, **_LOADING
        )
    if not dropout:
        check_deterministic(model)
    return PolicyModel(model.train())


def load_scalar_model(
    source: str | Path,
    *,
    head: str = "stored",
    dropout: float = 0.0,
    seed: int = 0,
) -> ScalarHeadModel:
    """Return a decoder with a scalar head, fp32.

    Args:
        source: folder or hub name; a sequence classifier (`head="stored"`) or any causal LM.
        head: "stored" reads `score` and `reward_offset` of a reward model; "zero" starts values
            at 0; "reward" draws N(0, 1 / sqrt(H + 1)) as for a new reward model.
        dropout: probability for every dropout of the config.
        seed: of the drawn head.

    Raises:
        ValueError: if `head` is unknown or the checkpoint stores no scalar head.
    """
    if head not in ("stored", "zero", "reward"):
        raise ValueError(f"head={head!r} must be 'stored', 'zero' or 'reward'")
    config = _config(source, dropout)
    if head == "stored":
        model = _stored_scalar_model(source, config)
    else:
        model = _new_scalar_model(source, config, head=head, seed=seed)
    if not dropout:
        check_deterministic(model.trunk)
    return model.train()


def _new_scalar_model(
    source: str | Path, config: PretrainedConfig, *, head: str, seed: int
) -> ScalarHeadModel:
    model: Any = AutoModelForCausalLM.from_pretrained(
        str(source), config=config, dtype=torch.float32, **_LOADING
    )
    hidden_size = model.get_output_embeddings().in_features
    std = 0.0 if head == "zero" else (hidden_size + 1) ** -0.5
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return ScalarHeadModel(model.base_model, scalar_head(hidden_size, init_std=std))


def _stored_scalar_model(source: str | Path, config: PretrainedConfig) -> ScalarHeadModel:
    config.num_labels = 1
    model: Any
    model, info = AutoModelForSequenceClassification.from_pretrained(
        str(source), config=config, dtype=torch.float32, output_loading_info=True, **_LOADING
    )
    if info["missing_keys"] or not isinstance(getattr(model, "score", None), nn.Linear):
        raise ValueError(
            f"{source} stores no reward head (missing {sorted(info['missing_keys'])}): "
            "train one with +experiment=reward, or start from head='zero'"
        )
    head = scalar_head(model.score.in_features, init_std=0.0)
    with torch.no_grad():
        head.weight.copy_(model.score.weight)
        head.bias.fill_(float(getattr(config, "reward_offset", 0.0)))
    return ScalarHeadModel(model.base_model, head)


def frozen(model: ModelT) -> ModelT:
    """Return `model` in eval mode, without gradients."""
    return model.eval().requires_grad_(False)


def export_policy(policy: PolicyModel, folder: Path, state: Mapping[str, Tensor]) -> None:
    """Write the policy as a Hugging Face causal LM in safetensors.

    Args:
        policy: gives the architecture.
        folder: created if missing.
        state: full state dict of `policy`.
    """
    prefix = "model."
    weights = {k.removeprefix(prefix): v for k, v in state.items()}
    policy.model.save_pretrained(folder, state_dict=weights)


def export_scalar_model(
    model: ScalarHeadModel, folder: Path, state: Mapping[str, Tensor], *, pad_token_id: int
) -> None:
    """Write a reward model as a Hugging Face sequence classifier with one label.

    The head's bias, which such classifiers do not have, stands in config.json as
    `reward_offset`; `load_scalar_model` adds it.
    """
    config = type(model.trunk.config).from_dict(model.trunk.config.to_dict())
    config.num_labels, config.pad_token_id = 1, pad_token_id
    config.reward_offset = float(state["head.bias"])
    classifier = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    weights = {"score.weight": state["head.weight"]}
    prefix = f"{classifier.base_model_prefix}."
    weights |= {
        prefix + k.removeprefix("trunk."): v for k, v in state.items() if k.startswith("trunk.")
    }
    missing, unexpected = classifier.load_state_dict(weights, strict=False)
    if missing or unexpected:
        raise ValueError(f"cannot export: missing {missing}, unexpected {unexpected}")
    classifier.save_pretrained(folder)


@torch.no_grad()
def check_deterministic(model: PreTrainedModel) -> None:
    """Check that two forwards in train mode agree to the bit, so that no dropout is left.

    A model on the meta device, which has no numbers yet, passes.

    Raises:
        ValueError: if they differ.
    """
    if next(model.parameters()).is_meta:
        return
    was_training = model.training
    model.train()
    input_ids = torch.arange(8, device=next(model.parameters()).device).unsqueeze(0)
    first, second = (model(input_ids=input_ids, use_cache=False)[0] for _ in range(2))
    model.train(was_training)
    if not torch.equal(first, second):
        raise ValueError(
            f"two forwards of {type(model).__name__} in train mode differ: something random "
            "(dropout) is still on, and the ratio would not start at 1"
        )


def _config(source: str | Path | None, dropout: float) -> PretrainedConfig:
    return set_dropout(AutoConfig.from_pretrained(str(source), trust_remote_code=False), dropout)
