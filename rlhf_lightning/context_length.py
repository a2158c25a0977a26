"""How many tokens the model can read, held against what the configuration asks of it."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf
from transformers import AutoConfig, PretrainedConfig

from rlhf_lightning.composition import ConfigError
from rlhf_lightning.models.loading import load_config, loading_options


def model_config(cfg: DictConfig, start: str | None) -> PretrainedConfig:
    """Return the config of the model that a stage starts from; no weight is read.

    Args:
        cfg: of the stage.
        start: folder or hub name; None for a model from scratch.
    """
    if start is None:
        fields: Any = OmegaConf.to_container(cfg.model.from_scratch, resolve=True)
        return AutoConfig.for_model(**fields)
    options = loading_options(
        start,
        revision=cfg.model.get("revision"),
        trust_remote_code=bool(cfg.model.get("trust_remote_code")),
    )
    return load_config(start, options)


def context_length(cfg: DictConfig, start: str | None) -> int | None:
    """Return the number of positions of the model that a stage starts from.

    Args:
        cfg: of the stage.
        start: folder or hub name; None for a model from scratch.

    Returns:
        `max_position_embeddings`; None where the architecture has no such limit.
    """
    limit = getattr(model_config(cfg, start).get_text_config(), "max_position_embeddings", None)
    return None if limit is None else int(limit)


def check_context_length(cfg: DictConfig, limit: int | None) -> None:
    """Refuse lengths that the model cannot read, before anything is trained.

    Raises:
        ConfigError: with both numbers and their keys.
    """
    if limit is None:
        return
    sums: list[tuple[str, ...]] = [("data.max_length",), ("evaluation.max_new_tokens",)]
    if cfg.stage == "ppo":
        answers = ("module.sampling.max_new_tokens", "evaluation.max_new_tokens")
        sums = [("data.max_prompt_length", key) for key in answers]
    for keys in sums:
        values = [int(OmegaConf.select(cfg, key)) for key in keys]
        if sum(values) > limit:
            asked = " + ".join(f"{k}={v}" for k, v in zip(keys, values, strict=True))
            total = f" = {sum(values)}" if len(keys) > 1 else ""
            raise ConfigError(
                f"{asked}{total} tokens are more than the model's context of {limit} "
                f"(max_position_embeddings): lower {' or '.join(keys)}"
            )


def longest_prompt(cfg: DictConfig, limit: int | None) -> int:
    """Return how long a prompt may be that is to be answered in an evaluation."""
    wanted = int(cfg.data.get("max_prompt_length", cfg.data.get("max_length")))
    room = wanted if limit is None else limit - int(cfg.evaluation.max_new_tokens)
    return max(min(wanted, room), 1)
