"""Evaluation of a stage: its held-out prompts, and the comparison at its end."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TypeVar

from torch import nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedTokenizerBase

from rlhf_lightning.app.config.compose import ConfigError
from rlhf_lightning.app.config.settings import TrainSettings
from rlhf_lightning.app.stages.spec import TrainingComponents
from rlhf_lightning.batches import PromptBatch
from rlhf_lightning.data.datamodules import PromptDataModule
from rlhf_lightning.data.records import Record
from rlhf_lightning.evaluation.final_metrics import Findings
from rlhf_lightning.evaluation.generate import Sampling, side_by_side, values_of
from rlhf_lightning.evaluation.held_out import (
    HeldOutComparison,
    Questions,
    encode_safety_prompts,
    repeated,
)
from rlhf_lightning.evaluation.metrics import Judges
from rlhf_lightning.evaluation.safety import SafetyCheck
from rlhf_lightning.models.factory import frozen, load_policy
from rlhf_lightning.models.heads import PolicyModel
from rlhf_lightning.models.loading import load_config, loading_options
from rlhf_lightning.models.lora import AdaptedPolicy, AdaptedScalarModel
from rlhf_lightning.models.precision import round_frozen_weights
from rlhf_lightning.rollout.scorers.base import Scorer

logger = logging.getLogger(__name__)
ModelT = TypeVar("ModelT", bound=nn.Module)


def model_config(settings: TrainSettings) -> PretrainedConfig:
    """Return the config of the model that a stage starts from; no weight is read."""
    start, model = settings.start, settings.model
    if start is None:
        return AutoConfig.for_model(**(model.from_scratch or {}))
    return load_config(start, loading_options(start, **model.origin))


def context_length(settings: TrainSettings) -> int | None:
    """Return the number of positions of the model that a stage starts from.

    Returns:
        `max_position_embeddings`; None where the architecture has no such limit.
    """
    limit = getattr(model_config(settings).get_text_config(), "max_position_embeddings", None)
    return None if limit is None else int(limit)


def check_context_length(settings: TrainSettings, limit: int | None) -> None:
    """Refuse lengths that the model cannot read, before anything is trained.

    Raises:
        ConfigError: with both numbers and their keys.
    """
    if limit is None:
        return
    for keys in settings.spec.context:
        values = [int(settings.select(key)) for key in keys]
        if sum(values) > limit:
            asked = " + ".join(f"{k}={v}" for k, v in zip(keys, values, strict=True))
            total = f" = {sum(values)}" if len(keys) > 1 else ""
            raise ConfigError(
                f"{asked}{total} tokens are more than the model's context of {limit} "
                f"(max_position_embeddings): lower {' or '.join(keys)}"
            )


def longest_prompt(settings: TrainSettings, limit: int | None) -> int:
    """Return how long a prompt may be that is to be answered in an evaluation."""
    wanted = int(settings.data.arguments[settings.data.prompt_length_key])
    room = wanted if limit is None else limit - int(settings.evaluation.max_new_tokens)
    return max(min(wanted, room), 1)


class EvaluationPrompts(PromptDataModule):
    """Prompts that are answered and not trained on: of few, each is asked several times."""

    _may_repeat = True

    def _warn(self, records: Sequence[Record]) -> None:
        """Leave it to the data that is trained on, whose prompts these are."""


def prompt_data(
    settings: TrainSettings, tokenizer: PreTrainedTokenizerBase, *, num_prompts: int
) -> PromptDataModule:
    """Return the prompts of the stage's records, for evaluation and normalization.

    Held out are at most `num_prompts`; of training prompts whole batches, at least `num_prompts`.
    """
    batch_size = min(settings.evaluation.batch_size, num_prompts)
    return EvaluationPrompts(
        settings.data.source.build(),
        tokenizer,
        batch_size=batch_size,
        num_iterations=-(-num_prompts // batch_size),
        max_prompt_length=_max_prompt_length(settings),
        seed=settings.seed,
        over_long=settings.data.arguments["over_long"],
        max_validation_rows=num_prompts,
        validation_batch_size=batch_size,
    )


def held_out_comparison(
    settings: TrainSettings,
    tokenizer: PreTrainedTokenizerBase,
    sampling: Sampling,
    scorer: Scorer | None,
    *,
    num_prompts: int,
) -> HeldOutComparison | None:
    """Return what compares the stage's policy with its start; None if no prompt is held out.

    Args:
        settings: of the stage.
        tokenizer: of the policy.
        sampling: how both answer.
        scorer: scores answers, or None.
        num_prompts: at most so many are asked.

    Raises:
        BadRecordError: for a file of safety prompts that cannot be read.
        ValueError: if all of its prompts of a kind are too long.
    """
    several = settings.evaluation.answers_per_prompt
    data = prompt_data(settings, tokenizer, num_prompts=num_prompts)
    batches = data.val_dataloader()
    if not batches:
        return None
    gold, safety = settings.evaluation.gold, settings.safety
    check = None if safety is None else safety.build()
    asked = () if check is None else safety_prompts(settings, tokenizer, check)
    judges = Judges(None if gold is None else gold.build(), scored=scorer is not None, safety=check)
    questions = Questions([p for b in batches for p in repeated(b, several)], asked, several)
    return HeldOutComparison(questions, sampling, judges, settings.seed, scorer)


def safety_prompts(
    settings: TrainSettings, tokenizer: PreTrainedTokenizerBase, check: SafetyCheck | None = None
) -> Sequence[PromptBatch]:
    """Return the prompts of the safety file of a stage, if it has one.

    Args:
        settings: of the stage.
        tokenizer: of the policy.
        check: of the configuration; None to build it.

    Raises:
        BadRecordError: for a file that cannot be read.
        ValueError: if all prompts of a kind are too long.
    """
    if check is None:
        if settings.safety is None or not settings.safety.get("prompts"):
            return ()
        check = settings.safety.build()
    (asked,) = encode_safety_prompts(
        check.records(),
        [tokenizer],
        max_prompt_length=_max_prompt_length(settings),
        batch_size=settings.evaluation.batch_size,
        setting=f"data.{settings.data.prompt_length_key}",
    )
    return asked


def _max_prompt_length(settings: TrainSettings) -> int:
    return longest_prompt(settings, context_length(settings))


def placed(parts: TrainingComponents, model: ModelT) -> ModelT:
    """Put a model where training was: Lightning leaves its own on the CPU after `fit`."""
    return model.to(parts.trainer.strategy.root_device)


def validate(parts: TrainingComponents) -> dict[str, float]:
    """Return the metrics of all held-out records."""
    trainer, loader = parts.trainer, parts.data.val_dataloader()
    trainer.limit_val_batches = 1.0
    # Lightning would log a row behind the last iteration; the summary gets these values.
    loggers, trainer.loggers = trainer.loggers, []
    try:
        results = trainer.validate(parts.module, dataloaders=loader, verbose=False)
    finally:
        trainer.loggers = loggers
    return dict(results[0]) if results else {}


def start_policy(settings: TrainSettings, parts: TrainingComponents) -> PolicyModel:
    """Return the policy that the stage started from, frozen; of an adapter the base itself.

    Raises:
        ManifestError: if another model stands in its place by now.
    """
    trained = getattr(parts.module, settings.spec.trained)
    if isinstance(trained, AdaptedPolicy | AdaptedScalarModel):
        return frozen(AdaptedPolicy(trained.base, None))
    policy = frozen(load_policy(str(settings.start), **settings.model.origin))
    parts.module.source.check()  # behind the load: it may take minutes
    round_frozen_weights(policy.model, settings.compute_precision)
    return policy


def compare(
    settings: TrainSettings,
    parts: TrainingComponents,
    baseline: PolicyModel,
    metrics: dict[str, float],
) -> Findings:
    """Compare the trained policy with `baseline` on held-out prompts.

    Args:
        settings: of the stage.
        parts: with what was trained.
        baseline: the policy that the stage started from.
        metrics: that are known already.
    """
    comparison = held_out_comparison(
        settings,
        parts.tokenizer,
        parts.sampling,
        parts.scorer,
        num_prompts=settings.evaluation.num_prompts,
    )
    if comparison is None:
        logger.warning("no prompt is held out: no comparison with %s", settings.start)
        return Findings(metrics)
    mine = comparison.ask_policy(placed(parts, parts.module.policy), placed(parts, baseline))
    theirs = comparison.ask_baseline(baseline)
    samples = side_by_side(mine.main, theirs.main, settings.evaluation.num_samples)
    metrics = metrics | comparison.measure(mine, theirs)
    return Findings(metrics, samples, values_of(mine.main, theirs.main))
