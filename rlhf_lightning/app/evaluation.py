"""The prompts of a stage for its evaluation, and the comparison that they are asked in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from transformers import AutoConfig, PretrainedConfig, PreTrainedTokenizerBase

from rlhf_lightning.app.config.compose import ConfigError
from rlhf_lightning.app.stages.spec import find_stage, start_of
from rlhf_lightning.batches import PromptBatch
from rlhf_lightning.data.datamodules import PromptDataModule
from rlhf_lightning.evaluation.generate import Sampling
from rlhf_lightning.evaluation.held_out import (
    HeldOutComparison,
    Questions,
    encode_safety_prompts,
    repeated,
)
from rlhf_lightning.evaluation.metrics import Judges
from rlhf_lightning.evaluation.safety import SafetyCheck
from rlhf_lightning.models.loading import load_config, loading_options
from rlhf_lightning.rollout.scorers.base import Scorer


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
    for keys in find_stage(cfg.stage).context:
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


class EvaluationPrompts(PromptDataModule):
    """Prompts that are answered and not trained on: of few, each is asked several times."""

    _may_repeat = True


def prompt_data(
    cfg: DictConfig, tokenizer: PreTrainedTokenizerBase, *, num_prompts: int
) -> PromptDataModule:
    """Return the prompts of the stage's records, for evaluation and normalization.

    Held out are at most `num_prompts`; of training prompts whole batches, at least `num_prompts`.
    """
    batch_size = min(cfg.evaluation.batch_size, num_prompts)
    return EvaluationPrompts(
        instantiate(cfg.data.source),
        tokenizer,
        batch_size=batch_size,
        num_iterations=-(-num_prompts // batch_size),
        max_prompt_length=_max_prompt_length(cfg),
        seed=cfg.seed,
        over_long=cfg.data.over_long,
        max_validation_rows=num_prompts,
        validation_batch_size=batch_size,
    )


def held_out_comparison(
    cfg: DictConfig,
    tokenizer: PreTrainedTokenizerBase,
    sampling: Sampling,
    scorer: Scorer | None,
    *,
    num_prompts: int,
) -> HeldOutComparison | None:
    """Return what compares the stage's policy with its start; None if no prompt is held out.

    Args:
        cfg: of the stage.
        tokenizer: of the policy.
        sampling: how both answer.
        scorer: scores answers, or None.
        num_prompts: at most so many are asked.

    Raises:
        BadRecordError: for a file of safety prompts that cannot be read.
        ValueError: if all of its prompts of a kind are too long.
    """
    several = cfg.evaluation.answers_per_prompt
    data = prompt_data(cfg, tokenizer, num_prompts=num_prompts)
    batches = data.val_dataloader()
    if not batches:
        return None
    gold, safety = cfg.evaluation.gold, cfg.get("safety")
    check = None if safety is None else instantiate(safety, _convert_="all")
    asked = () if check is None else safety_prompts(cfg, tokenizer, check)
    judges = Judges(
        None if gold is None else instantiate(gold), scored=scorer is not None, safety=check
    )
    questions = Questions([p for b in batches for p in repeated(b, several)], asked, several)
    return HeldOutComparison(questions, sampling, judges, cfg.seed, scorer)


def safety_prompts(
    cfg: DictConfig, tokenizer: PreTrainedTokenizerBase, check: SafetyCheck | None = None
) -> Sequence[PromptBatch]:
    """Return the prompts of the safety file of a stage, if it has one.

    Args:
        cfg: of the stage.
        tokenizer: of the policy.
        check: of the configuration; None to build it.

    Raises:
        BadRecordError: for a file that cannot be read.
        ValueError: if all prompts of a kind are too long.
    """
    if check is None:
        if not (cfg.get("safety") or {}).get("prompts"):
            return ()
        check = instantiate(cfg.safety, _convert_="all")
    (asked,) = encode_safety_prompts(
        check.records(),
        [tokenizer],
        max_prompt_length=_max_prompt_length(cfg),
        batch_size=cfg.evaluation.batch_size,
        setting="data.max_prompt_length" if "max_prompt_length" in cfg.data else "data.max_length",
    )
    return asked


def _max_prompt_length(cfg: DictConfig) -> int:
    return longest_prompt(cfg, context_length(cfg, start_of(cfg)))
