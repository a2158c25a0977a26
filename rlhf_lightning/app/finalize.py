"""The final figures of a stage: a policy is compared with its start, a reward model normalized."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from rlhf_lightning.app.config.settings import TrainSettings
from rlhf_lightning.app.evaluation import (
    TrainingComponents,
    compare,
    num_answered,
    num_shown,
    placed,
    prompt_length,
    validate,
)
from rlhf_lightning.data.encode import EncodedPreference
from rlhf_lightning.evaluation.compare import start_policy
from rlhf_lightning.evaluation.final_metrics import Findings, held_out_loss, trained_findings
from rlhf_lightning.evaluation.normalization import normalize_reward_model
from rlhf_lightning.evaluation.reward_accuracy import score_pairs, share_right
from rlhf_lightning.models.factory import frozen, load_scalar_model
from rlhf_lightning.models.precision import release_freed_memory
from rlhf_lightning.modules.reward import RewardModule
from rlhf_lightning.modules.sft import SFTModule
from rlhf_lightning.runs.folder import RunFolder, read_metrics
from rlhf_lightning.text.tokenizers import check_same_tokenizer


def measure(settings: TrainSettings, folder: RunFolder, parts: TrainingComponents) -> Findings:
    """Return the final figures: of the training itself, and of the comparison or normalization.

    Every rank measures the same.
    """
    release_freed_memory()  # of the optimizer: measuring may read one more model
    with cast(Any, parts.trainer.strategy.precision_plugin).forward_context():  # that of training
        metrics = {} if settings.spec.rolls_out else validate(parts)
        rows = read_metrics(folder.metrics) if parts.trainer.is_global_zero else []
        placed(parts, parts.module.trained)
        batch_size = settings.evaluation.batch_size
        shown = trained_findings(parts.module, parts.data, rows, batch_size=batch_size)
        if settings.spec.trains_policy:
            findings = _compared_policy(settings, parts)
        else:
            findings = _normalized_model(settings, parts)
    findings.metrics = {**metrics, **shown.metrics, **findings.metrics}
    findings.values = findings.values or shown.values
    return findings


def _compared_policy(settings: TrainSettings, parts: TrainingComponents) -> Findings:
    """Compare the policy with its start; where nothing judges, show responses of both."""
    module, gold = parts.module, settings.evaluation.gold
    if settings.start is None:
        return Findings({})  # nothing to compare with
    if not isinstance(module, SFTModule):
        baseline = start_policy(module)
        if parts.scorer is None and settings.scorer is not None:
            parts.scorer = settings.scorer.build()
            for model in parts.scorer.build():
                placed(parts, model)
        return compare(settings, parts, baseline)
    if gold is None and module.device_mesh is not None:
        return Findings({})  # no judge, and no room for a second whole model
    baseline, metrics = start_policy(module), dict[str, float]()
    if parts.data.rows("validation"):
        loader = parts.data.val_dataloader()
        metrics["val/baseline_loss"] = held_out_loss(module, placed(parts, baseline), loader)
    if gold is None:
        shown = num_shown(settings) if parts.data.rows("validation") else 0
        if not shown:
            return Findings(metrics)
        few: dict[str, Any] = {"num_prompts": shown, "num_samples": shown, "safety": None}
        few["over_long"] = "drop"
        return Findings(metrics, compare(settings, parts, baseline, **few).samples)
    findings = compare(settings, parts, baseline)
    findings.metrics |= metrics
    return findings


def _normalized_model(settings: TrainSettings, parts: TrainingComponents) -> Findings:
    """Hold a larger model against the reward model, if there is one, and normalize its scores."""
    metrics, evaluation = _larger_model(settings, parts), settings.evaluation
    if num_answered(settings):
        metrics |= normalize_reward_model(
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
    return Findings(metrics)


def _larger_model(settings: TrainSettings, parts: TrainingComponents) -> dict[str, float]:
    """Return the accuracy of a larger model, which tells noise and too small a model apart."""
    rows = cast("Sequence[EncodedPreference]", parts.data.rows("validation"))
    source = settings.evaluation.larger_reward_model
    if source is None or not rows:
        return {}
    fix = "train it on the same policy's tokenizer"
    check_same_tokenizer(parts.tokenizer, source, fix=fix)
    with parts.trainer.strategy.root_device:
        model = frozen(load_scalar_model(source))
    scored = score_pairs(
        model,
        rows,
        batch_size=settings.evaluation.batch_size,
        pad_token_id=int(parts.tokenizer.pad_token_id),  # type: ignore[arg-type]
    )
    return {"val/larger_model_accuracy": share_right(scored)}
