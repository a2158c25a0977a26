"""Direct preference optimization: from a policy to a better one, on preference pairs alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_lightning.app.stages.spec import StageSpec, TrainingComponents
from rlhf_lightning.hparams import DPOHparams

if TYPE_CHECKING:
    from rlhf_lightning.app.config.settings import TrainSettings
    from rlhf_lightning.evaluation.final_metrics import Findings
    from rlhf_lightning.runs.folder import RunFolder


def finish(settings: TrainSettings, folder: RunFolder, parts: TrainingComponents) -> Findings:
    """Validate, and compare the policy with its start, by gold and by a scorer if there are any."""
    from rlhf_lightning.app.evaluation import compare, placed, start_policy, validate

    del folder
    metrics = validate(parts)
    baseline = start_policy(settings, parts.module.policy)
    if settings.scorer is not None:
        parts.scorer = settings.scorer.build()
        for model in parts.scorer.build():
            placed(parts, model)
    return compare(settings, parts, baseline, metrics)


def num_answered(settings: TrainSettings) -> int:
    """Return how many held-out prompts are answered."""
    return int(settings.evaluation.num_prompts)


def start_lines(settings: TrainSettings) -> dict[str, object]:
    """Return the objective."""
    dpo = settings.hparams
    smoothing = f", {100 * dpo.label_smoothing:g} % of labels wrong" if dpo.label_smoothing else ""
    return {"objective": f"{dpo.kind}, beta {dpo.beta:g}{smoothing}"}


STAGE = StageSpec(
    name="dpo",
    title="DPO",
    settings="dpo",
    hparams={"dpo": DPOHparams},
    rates={"learning_rate": "policy"},
    starts_from="sft",
    uses=("sft",),
    paired=True,
    objective="val/accuracy",
    finish=finish,
    num_answered=num_answered,
    start_lines=start_lines,
)
