"""The learning rates of a run: as set, or else by the size of the model that it starts from."""

from __future__ import annotations

import torch
from omegaconf import DictConfig
from transformers import AutoModelForCausalLM, PretrainedConfig

from rlhf_lightning.app.config.compose import ConfigError
from rlhf_lightning.app.evaluation import model_config
from rlhf_lightning.app.stages.spec import find_stage
from rlhf_lightning.models.learning_rates import default_learning_rate


def choose_rates(cfg: DictConfig, start: str | None) -> tuple[str, ...]:
    """Set the learning rates that the configuration leaves open; an explicit one stays.

    The size is that of the config of the model that is loaded; no weight is read.

    Args:
        cfg: of the stage, in which the rates are set.
        start: folder or hub name of the model; None for one from scratch.

    Returns:
        The line of each rate for the first screen: what it is, and why.

    Raises:
        ConfigError: if the config does not say how large the model is.
    """
    stage = find_stage(cfg.stage)
    settings, rates = cfg.module[stage.settings], stage.rates
    unset = [key for key in rates if settings[key] is None]
    count = _count(cfg, start, f"module.{stage.settings}.{unset[0]}") if unset else 0
    for key in unset:
        settings[key] = default_learning_rate(rates[key], count, lora=cfg.lora is not None)
    adapters = ", of which adapters are trained" if cfg.lora is not None else ""
    by_size = f"by the size of the model: {count:,} weights{adapters}"
    return tuple(
        f"{key} {settings[key]:g}, {by_size if key in unset else 'as set'}" for key in rates
    )


def _count(cfg: DictConfig, start: str | None, key: str) -> int:
    config = model_config(cfg, start)
    try:
        return count_weights(config, trust_remote_code=bool(cfg.model.get("trust_remote_code")))
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, ImportError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"{key} follows the size of {start or 'the model'}, which its config does not give "
            f"({reason}): set {key}=1.0e-5 or what suits the model, as docs/models.md has it"
        ) from error


def count_weights(config: PretrainedConfig, *, trust_remote_code: bool = False) -> int:
    """Return the weights of a causal language model of this config; nothing is allocated."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    return sum(parameter.numel() for parameter in model.parameters())
