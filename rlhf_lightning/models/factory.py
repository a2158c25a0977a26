"""Factories: a policy or a scalar model from a folder, a hub name, or a config from scratch."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict, TypeVar, Unpack

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BitsAndBytesConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from rlhf_lightning.arguments import Default, Fraction, Line, PathOrName, RunsCode, Seed, checked
from rlhf_lightning.hparams import LoraHparams, Precision
from rlhf_lightning.models.building import checkpoint_activations, reads_weights, seeded_init
from rlhf_lightning.models.heads import PolicyModel, ScalarHeadModel, scalar_head
from rlhf_lightning.models.loading import (
    load_config,
    load_whole,
    loading_options,
    mended_settings,
    not_replaced,
    outside_trunk,
    reward_normalization,
    warn_once,
)
from rlhf_lightning.models.lora import AdaptedBase, add_policy, add_scalar_model
from rlhf_lightning.models.precision import round_frozen_weights

ModelT = TypeVar("ModelT", bound=nn.Module)
Head = Literal["stored", "zero", "reward"]


class ModelOptions(TypedDict, total=False):
    """Options of what is loaded.

    Attributes:
        dropout: probability for every dropout of the config; 0 in RLHF.
        activation_checkpointing: compute decoder layers again in the backward pass.
        revision: branch, tag or commit of a hub name.
        trust_remote_code: run the code beside the weights, see `loading_options`.
    """

    dropout: Annotated[Fraction, Default(0.0)]
    activation_checkpointing: Annotated[bool, Default(False)]
    revision: Line | None
    trust_remote_code: Annotated[RunsCode, Default(False)]


def set_dropout(config: PretrainedConfig, probability: float) -> PretrainedConfig:
    """Set every dropout field of `config`; fields reach functional dropout, modules do not."""
    for name, value in vars(config).items():
        if "drop" in name and isinstance(value, int | float) and not isinstance(value, bool):
            setattr(config, name, probability)
    return config


@checked
def load_policy(
    source: PathOrName | None = None,
    *,
    from_scratch: Mapping[str, Any] | None = None,
    seed: Seed = 0,
    lora: LoraHparams | None = None,
    **options: Unpack[ModelOptions],
) -> PolicyModel:
    """Return a trainable causal language model with fp32 weights and its dropout set.

    Args:
        source: folder or hub name of a Hugging Face checkpoint in safetensors.
        from_scratch: fields of a config (with `model_type`) for a model with random weights.
        seed: seeds random weights, and a new adapter.
        lora: train an adapter on the frozen model instead of the model.
        **options: see `ModelOptions`.

    Raises:
        ValueError: unless exactly one of `source` and `from_scratch` is given, or if `source`
            cannot be loaded.
    """
    if lora is not None:
        if source is None:
            raise ValueError("lora adapts a trained model: give load_policy its source")
        return add_policy(load_base(source, lora, **options), "policy", seed=seed)
    if (source is None) == (from_scratch is None):
        raise ValueError("give exactly one of source and from_scratch to load_policy")
    if from_scratch is not None:
        config = set_dropout(AutoConfig.for_model(**from_scratch), options["dropout"])
        with seeded_init(seed):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        if reads_weights():
            model.to(torch.get_default_device())
    else:
        assert source is not None  # or it is from scratch
        model = _load(AutoModelForCausalLM, source, options)
        model.generation_config = mended_settings(model.generation_config, source)
    return PolicyModel(_ready(model, options).train())


def _ready(model: Any, options: ModelOptions) -> Any:
    """Return a model that was checked to be deterministic, unless it has dropout."""
    if not options["dropout"]:
        check_deterministic(model)
    if options["activation_checkpointing"]:
        checkpoint_activations(model)
    return model


@checked
def load_base(
    source: PathOrName,
    lora: LoraHparams,
    **options: Unpack[ModelOptions],
) -> AdaptedBase:
    """Return a frozen causal language model that adapters can be put on.

    Args:
        source: folder or hub name of a Hugging Face checkpoint in safetensors.
        lora: settings of the adapters, and the precision in which the base is held.
        **options: see `ModelOptions`.

    Raises:
        ValueError: if a 4-bit base is asked for without CUDA or without bitsandbytes.
    """
    extra = _four_bit() if lora.quantization == "nf4" else {}
    model: Any = _load(AutoModelForCausalLM, source, options, **extra)
    model.generation_config = mended_settings(model.generation_config, source)
    again = options["activation_checkpointing"]  # of layers with their adapters
    _ready(model, {**options, "activation_checkpointing": False})
    return AdaptedBase(model, lora, activation_checkpointing=again)


def _four_bit() -> dict[str, Any]:
    if not torch.cuda.is_available() or importlib.util.find_spec("bitsandbytes") is None:
        fix = "use lora=lora under trainer.precision=bf16-mixed"
        raise ValueError(f"lora.quantization=nf4 needs CUDA and bitsandbytes ('.[gpu]'): {fix}")
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    return {"quantization_config": config, "device_map": {"": torch.cuda.current_device()}}


@checked
def load_scalar_model(
    source: PathOrName,
    *,
    head: Head = "stored",
    seed: Seed = 0,
    lora: LoraHparams | None = None,
    precision: Precision | None = None,
    **options: Unpack[ModelOptions],
) -> ScalarHeadModel:
    """Return a decoder with a scalar head, fp32.

    Args:
        source: folder or hub name; a sequence classifier (`head="stored"`) or any causal LM.
        head: "stored" reads `score` and `reward_offset` of a reward model, and mean and std where
            its config.json has them, as OpenRLHF's; "zero" starts values at 0; "reward" draws
            N(0, 1 / sqrt(H + 1)) as for a new reward model.
        seed: seeds a new head, and a new adapter.
        lora: train an adapter and the head on the frozen causal LM in `source`.
        precision: the Trainer's, for a model that stays frozen: its matrices are then held in the
            dtype that autocast would give them.
        **options: see `ModelOptions`.

    Raises:
        ValueError: if `head` is unknown, if the checkpoint cannot be loaded or stores no scalar
            head, or if an adapter is to start from a stored one.
    """
    if lora is not None:
        if head == "stored":
            raise ValueError("lora adapts a causal language model: use head='zero' or 'reward'")
        base = load_base(source, lora, **options)
        std = head_std(base.hidden_size, head)
        return add_scalar_model(base, "reward", init_std=std, seed=seed)
    if head == "stored":
        model = _stored_scalar_model(source, options)
    else:
        model = _new_scalar_model(source, options, head=head, seed=seed)
    _ready(model.trunk, options)
    if precision is not None:
        round_frozen_weights(frozen(model).trunk, precision)
    return model.train()


def head_std(hidden_size: int, head: str) -> float:
    """Return the standard deviation of a new head's weights: 0, or 1 / sqrt(H + 1)."""
    return 0.0 if head == "zero" else (hidden_size + 1) ** -0.5


def _new_scalar_model(
    source: str | Path, options: ModelOptions, *, head: str, seed: int
) -> ScalarHeadModel:
    model: Any = _load(AutoModelForCausalLM, source, options, not_read=outside_trunk)
    hidden_size = model.get_output_embeddings().in_features
    with seeded_init(seed):
        new_head = scalar_head(hidden_size, init_std=head_std(hidden_size, head))
    return ScalarHeadModel(model.base_model, new_head.to(model.device))


def _stored_scalar_model(source: str | Path, options: ModelOptions) -> ScalarHeadModel:
    fix = "train one with +experiment=reward, or start from head='zero'"
    no_head = f"{source} stores no reward head (missing ['score.weight']): {fix}"
    model: Any = _load(
        AutoModelForSequenceClassification,
        source,
        options,
        num_labels=1,
        not_stored=lambda missing: no_head if missing == ["score.weight"] else None,
    )
    if not isinstance(getattr(model, "score", None), nn.Linear):
        raise ValueError(no_head)
    with model.score.weight.device:
        head = scalar_head(model.score.in_features, init_std=0.0)
    offset = getattr(model.config, "reward_offset", 0.0)
    if type(offset) not in (int, float) or not math.isfinite(offset):
        raise ValueError(f"{source}: reward_offset={offset!r} in its config.json is no number")
    with torch.no_grad():
        head.weight.copy_(model.score.weight)
        head.bias.fill_(float(offset))
    found = ScalarHeadModel(model.base_model, head)
    own = reward_normalization(model.config, source)
    if own is not None:
        found.normalize(*own)
    # An export of this framework has the offset; older ones do not say more.
    ours = hasattr(model.config, "reward_offset")
    found.normalized = own is not None or getattr(model.config, "reward_normalized", ours)
    if own is None and not ours:
        told = "is of another framework: its score is read at the token that ends a response"
        fix = "use scorer=text_reward_model scorer.ending=template or none"
        warn_once(f"{source} {told}. Where it was trained to be read elsewhere, {fix}")
    return found


def frozen(model: ModelT) -> ModelT:
    """Return `model` in eval mode, without gradients."""
    return model.eval().requires_grad_(False)


@torch.no_grad()
def check_deterministic(model: PreTrainedModel) -> None:
    """Check that two forwards in train mode are finite and agree to the bit: no dropout is left.

    A model on the meta device, which has no numbers yet, passes.

    Raises:
        ValueError: if they are not, or differ.
    """
    if next(model.parameters()).is_meta:
        return
    was_training = model.training
    model.train()
    input_ids = torch.arange(8, device=next(model.parameters()).device).unsqueeze(0)
    first, second = (model(input_ids=input_ids, use_cache=False)[0] for _ in range(2))
    model.train(was_training)
    if not bool(torch.isfinite(first).all()):
        name = f"{type(model).__name__} of {model.config.name_or_path or 'random weights'}"
        fix = "its weights are damaged or diverged, take an earlier checkpoint"
        raise ValueError(f"{name} returns non-finite numbers: {fix}")
    if not torch.equal(first, second):
        name = type(model).__name__
        raise ValueError(f"two forwards of {name} in train mode differ: dropout is still on")


def _load(cls: Any, source: str | Path, options: ModelOptions, **extra: Any) -> Any:
    """Return what `load_whole` returns: fp32, its dropout set."""
    revision, trusts = options["revision"], options["trust_remote_code"]
    loading = loading_options(source, revision=revision, trust_remote_code=trusts)
    with not_replaced(source):
        config = set_dropout(load_config(source, loading), options["dropout"])
        if "num_labels" in extra:
            config.num_labels = extra.pop("num_labels")
        return load_whole(cls, source, config=config, dtype=torch.float32, options=loading, **extra)
