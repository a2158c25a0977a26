"""Supervised fine-tuning: from a base model, or from random weights, to a policy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_lightning.app.stages.spec import StageSpec, TrainingComponents
from rlhf_lightning.hparams import SFTHparams

if TYPE_CHECKING:
    from rlhf_lightning.app.config.settings import TrainSettings
    from rlhf_lightning.evaluation.final_metrics import Findings
    from rlhf_lightning.runs.folder import RunFolder


def finish(settings: TrainSettings, folder: RunFolder, parts: TrainingComponents) -> Findings:
    """Validate, and compare the policy with its start where there is a start and a judge."""
    from rlhf_lightning.app.evaluation import compare, placed, start_policy, validate
    from rlhf_lightning.evaluation.final_metrics import Findings, held_out_loss

    del folder
    metrics = validate(parts)
    module, gold = parts.module, settings.evaluation.gold
    if settings.artifacts.base is None:
        return Findings(metrics)  # nothing to compare with
    if gold is None and module.device_mesh is not None:
        return Findings(metrics)  # nobody to judge, and no room for a second model that is whole
    baseline = start_policy(settings, parts)
    if metrics:
        loader = parts.data.val_dataloader()
        metrics["val/baseline_loss"] = held_out_loss(module, placed(parts, baseline), loader)
        if gold is None:
            return Findings(metrics)  # nobody to judge
    return compare(settings, parts, baseline, metrics)


def num_answered(settings: TrainSettings) -> int:
    """Return how many held-out prompts are answered: none without a judge or a baseline."""
    judged = settings.evaluation.gold is not None and settings.artifacts.base is not None
    return int(settings.evaluation.num_prompts) if judged else 0


STAGE = StageSpec(
    name="sft",
    title="supervised fine-tuning",
    settings="sft",
    hparams={"sft": SFTHparams},
    rates={"learning_rate": "sft"},
    starts_from="base",
    uses=("base",),
    objective="val/loss",
    maximised=False,
    finish=finish,
    num_answered=num_answered,
)
