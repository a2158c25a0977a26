"""Evaluation of a stage: its final figures, its held-out prompts, and the comparison at its end."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import lightning as L
from transformers import AutoConfig, PretrainedConfig

from rlhf_lightning.app.config.commands import EvaluateSettings
from rlhf_lightning.app.config.compose import ConfigError
from rlhf_lightning.app.config.settings import TrainSettings
from rlhf_lightning.data.record_datamodule import RecordDataModule
from rlhf_lightning.evaluation.compare import comparison_of, sample_sides, start_policy
from rlhf_lightning.evaluation.final_metrics import Findings, held_out_loss, trained_findings
from rlhf_lightning.evaluation.gates import check_gates
from rlhf_lightning.evaluation.normalization import normalize_reward_model
from rlhf_lightning.evaluation.safety import required_measures
from rlhf_lightning.models.heads import PolicyModel
from rlhf_lightning.models.loading import load_config, loading_options
from rlhf_lightning.models.precision import release_freed_memory
from rlhf_lightning.modules.base import RLHFModule
from rlhf_lightning.modules.reward import RewardModule
from rlhf_lightning.modules.sft import SFTModule
from rlhf_lightning.runs.folder import RunFolder, read_metrics
from rlhf_lightning.runs.summary import GateResult

logger = logging.getLogger(__name__)
SHOWN = 10  # responses before and after, where nothing judges them


@dataclass
class TrainingComponents:
    """Everything that a run is made of."""

    settings: TrainSettings  # with the learning rates and the vocabulary that were found
    folder: RunFolder
    data: RecordDataModule
    module: RLHFModule
    trainer: L.Trainer
    rates: tuple[str, ...]  # the learning rates, with why, a line each


def measure(parts: TrainingComponents) -> Findings:
    """Return the final figures: of the training itself, and of the comparison or normalization.

    Every rank measures the same.
    """
    settings = parts.settings
    release_freed_memory()  # of the optimizer: measuring may read one more model
    with cast(Any, parts.trainer.strategy.precision_plugin).forward_context():  # that of training
        metrics = {} if settings.spec.rolls_out else _validate(parts)
        rows = read_metrics(parts.folder.metrics) if parts.trainer.is_global_zero else []
        # Lightning leaves it on the CPU.
        parts.module.trained.to(parts.trainer.strategy.root_device)
        batch_size = settings.evaluation.batch_size
        shown = trained_findings(parts.module, parts.data, rows, batch_size=batch_size)
        if settings.spec.trains_policy:
            findings = _compared_policy(parts)
        else:
            findings = Findings(_normalized_model(parts))
    findings.metrics = {**metrics, **shown.metrics, **findings.metrics}
    findings.values = findings.values or shown.values
    return findings


def _validate(parts: TrainingComponents) -> dict[str, float]:
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


def _compared_policy(parts: TrainingComponents) -> Findings:
    """Compare the policy with its start; where nothing judges, show responses of both."""
    settings, module = parts.settings, parts.module
    gold = settings.evaluation.gold
    if settings.start is None:
        return Findings({})  # nothing to compare with
    if not isinstance(module, SFTModule):
        return compare(parts, start_policy(module))
    if gold is None and module.device_mesh is not None:
        return Findings({})  # no judge, and no room for a second whole model
    baseline, metrics, shown = start_policy(module), dict[str, float](), 0
    if parts.data.rows("validation"):
        loader, shown = parts.data.val_dataloader(), num_shown(settings)
        metrics["val/baseline_loss"] = held_out_loss(module, baseline, loader)
    if gold is not None:
        findings = compare(parts, baseline)
        findings.metrics |= metrics
        return findings
    if not shown:
        return Findings(metrics)
    few: dict[str, Any] = {"num_prompts": shown, "safety": None, "over_long": "drop"}
    return Findings(metrics, compare(parts, baseline, num_samples=shown, **few).samples)


def _normalized_model(parts: TrainingComponents) -> dict[str, float]:
    """Normalize the scores of a reward model, unless that is switched off."""
    settings, evaluation = parts.settings, parts.settings.evaluation
    if not num_answered(settings):
        return {}
    return normalize_reward_model(
        cast(RewardModule, parts.module),
        settings.data.source.build(),  # and not the pairs of `data.path`
        over_long=parts.data.over_long,
        max_new_tokens=evaluation.max_new_tokens,
        max_prompt_length=prompt_length(settings),
        temperature=evaluation.temperature,
        batch_size=evaluation.batch_size,
        micro_batch_size=evaluation.micro_batch_size,
        seed=settings.seed,
    )


def model_config(settings: TrainSettings) -> PretrainedConfig:
    """Return the config of the model that a stage starts from; no weight is read."""
    start, model = settings.start, settings.model
    if start is None:
        return AutoConfig.for_model(**(model.from_scratch or {}))
    return load_config(start, loading_options(start, **model.origin))


def context_length(settings: TrainSettings, config: PretrainedConfig | None = None) -> int | None:
    """Return the number of positions of the model that a stage starts from.

    Args:
        settings: of the stage.
        config: of that model, where it is known already.

    Returns:
        `max_position_embeddings`; None where the architecture has no such limit.
    """
    found = (config or model_config(settings)).get_text_config()
    limit = getattr(found, "max_position_embeddings", None)
    return None if limit is None else int(limit)


def check_context_length(settings: TrainSettings, config: PretrainedConfig | None = None) -> None:
    """Refuse lengths that the model cannot read, before anything is trained.

    Args are those of `context_length`.

    Raises:
        ConfigError: with all numbers and their keys, and lengths that fit.
    """
    if (limit := context_length(settings, config)) is None:
        return
    prompt, asked = f"data.{settings.data.prompt_length_key}", "evaluation.max_new_tokens"
    lengths: tuple[tuple[str, ...], ...] = ((prompt,), (asked,))
    if settings.spec.rolls_out:
        lengths = ((prompt, "module.sampling.max_new_tokens"), (prompt, asked))
    too_long: list[str] = []
    fits: dict[str, int] = {}
    for keys in lengths:
        values = {key: int(settings.select(key)) for key in keys}
        if (total := sum(values.values())) > limit:
            named = " + ".join(f"{key}={value}" for key, value in values.items())
            too_long.append(f"{named} = {total}" if len(keys) > 1 else named)
            room = limit if keys == (prompt,) else max(limit // 2, 1)
            fits |= {key: min(value, room) for key, value in values.items()}
    if too_long:
        raise ConfigError(
            f"{' and '.join(too_long)} tokens are more than the model's context of {limit} "
            f"(max_position_embeddings): use {' '.join(f'{k}={v}' for k, v in fits.items())}"
        )


def prompt_length(settings: TrainSettings) -> int:
    """Return how long a prompt may be that is to be answered in an evaluation."""
    limit = context_length(settings)
    wanted = int(settings.data.arguments[settings.data.prompt_length_key])
    room = wanted if limit is None else limit - int(settings.evaluation.max_new_tokens)
    return max(min(wanted, room), 1)


def num_answered(settings: TrainSettings) -> int:
    """Return how many prompts are answered when training is over: few without a judge."""
    if not settings.spec.trains_policy:
        return int(settings.hparams.normalization_samples)
    if settings.start is None:
        return 0  # nothing to compare with
    is_judged = settings.spec.is_scored or settings.evaluation.gold is not None
    return settings.evaluation.num_prompts if is_judged else num_shown(settings)


def num_shown(settings: TrainSettings) -> int:
    """Return how many prompts are answered to be read alone; texts have no prompts."""
    if settings.data.get("kind") != "demonstrations":
        return 0
    return min(SHOWN, settings.evaluation.num_prompts, settings.evaluation.num_samples)


def comparison_arguments(settings: TrainSettings | EvaluateSettings) -> dict[str, Any]:
    """Return the judges and the number of prompts, arguments of `compare` that settings say."""
    evaluation = settings.evaluation
    return {
        "gold": None if evaluation.gold is None else evaluation.gold.build(),
        "safety": None if settings.safety is None else settings.safety.build(),
        "answers_per_prompt": evaluation.answers_per_prompt,
        "num_prompts": evaluation.num_prompts,
        "batch_size": min(evaluation.batch_size, evaluation.num_prompts),
    }


def gates_of(
    settings: TrainSettings | EvaluateSettings, metrics: Mapping[str, float | None]
) -> tuple[GateResult, ...]:
    """Return the gates that the settings name, as these metrics pass them."""
    safety = settings.safety
    required = required_measures(None if safety is None else safety.get("prompts"))
    return check_gates(settings.gates, metrics, required=required)


def compare(
    parts: TrainingComponents, baseline: PolicyModel, num_samples: int | None = None, **changes: Any
) -> Findings:
    """Compare the trained policy with `baseline` on held-out prompts.

    Args:
        parts: parts with the trained module.
        baseline: the policy that the stage started from.
        num_samples: prompts to keep with a response of each; None for `evaluation.num_samples`.
        changes: arguments of `compare` that differ from the settings.
    """
    settings = parts.settings
    scorer = getattr(parts.module, "scorer", None)
    if scorer is None and settings.spec.is_scored and settings.scorer is not None:
        scorer = settings.scorer.build()
    comparison = comparison_of(
        parts.module,
        parts.data,
        source=settings.data.source.build(),
        scorer=scorer,
        max_prompt_length=prompt_length(settings),
        seed=settings.seed,
        setting=f"data.{settings.data.prompt_length_key}",
        **settings.evaluation.decoding,
        **comparison_arguments(settings) | changes,
    )
    if comparison is None:
        logger.warning("no prompt is held out: no comparison with %s", settings.start)
        return Findings({})
    kept = settings.evaluation.num_samples if num_samples is None else num_samples
    return sample_sides(parts.module, comparison, parts.module.policy, baseline, kept)
