"""Supervised fine-tuning: from a base model, or from random weights, to a policy."""

from __future__ import annotations

from typing import ClassVar, cast

from rlhf_lightning.app.config.settings import TrainSettings
from rlhf_lightning.app.evaluation import answers_of, compare, placed, start_policy
from rlhf_lightning.app.stages.spec import Stage, TrainingComponents
from rlhf_lightning.evaluation.final_metrics import Findings, held_out_loss
from rlhf_lightning.modules.sft import SFTModule
from rlhf_lightning.runs.folder import RunFolder

SHOWN = 10  # responses before and after, where nothing judges them


class SFTStage(Stage):
    """Supervised fine-tuning on demonstrations or plain texts."""

    module = SFTModule
    rates: ClassVar = {"learning_rate": "sft"}
    starts_from = "base"
    uses = ("base",)
    objective = "val/loss"
    maximised = False

    def finish(
        self, settings: TrainSettings, folder: RunFolder, parts: TrainingComponents
    ) -> Findings:
        """Compare the policy with its start where there is a start, by a judge if any."""
        module, gold = cast(SFTModule, parts.module), settings.evaluation.gold
        if settings.artifacts.base is None:
            return Findings({})  # nothing to compare with
        if gold is None and module.device_mesh is not None:
            return Findings({})  # no judge, and no room for a second whole model
        baseline, metrics = start_policy(settings, parts), dict[str, float]()
        if parts.data.rows("validation"):
            loader = parts.data.val_dataloader()
            metrics["val/baseline_loss"] = held_out_loss(module, placed(parts, baseline), loader)
        if gold is None:  # no judge: responses of both, to be read
            shown = self._shown(settings) if parts.data.rows("validation") else 0
            return Findings(metrics, answers_of(settings, parts, baseline, shown))
        findings = compare(settings, parts, baseline)
        findings.metrics |= metrics
        return findings

    def num_answered(self, settings: TrainSettings) -> int:
        """Return how many held-out prompts are answered: few without a judge, none at a base."""
        if settings.artifacts.base is None:
            return 0
        judged = settings.evaluation.gold is not None
        return super().num_answered(settings) if judged else self._shown(settings)

    def _shown(self, settings: TrainSettings) -> int:
        if settings.data.get("kind") != "demonstrations":  # texts have no prompts
            return 0
        return min(SHOWN, super().num_answered(settings), settings.evaluation.num_samples)


STAGE = SFTStage()
