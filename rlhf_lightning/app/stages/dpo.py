"""Direct preference optimization: from a policy to a better one, on preference pairs alone."""

from __future__ import annotations

from typing import ClassVar

from rlhf_lightning.app.config.compose import ConfigError
from rlhf_lightning.app.config.settings import TrainSettings
from rlhf_lightning.app.evaluation import compare, placed, start_policy
from rlhf_lightning.app.stages.spec import Stage, TrainingComponents
from rlhf_lightning.evaluation.final_metrics import Findings
from rlhf_lightning.modules.dpo import DPOModule
from rlhf_lightning.runs.folder import RunFolder


class DPOStage(Stage):
    """DPO, IPO or KTO; a scorer is only used to evaluate the result."""

    module = DPOModule
    rates: ClassVar = {"learning_rate": "policy"}
    starts_from = "sft"
    uses = ("sft",)
    sequences_per_row = 2
    scores = True
    objective = "val/accuracy"

    def check(self, settings: TrainSettings) -> None:
        """Refuse what DPO would leave unused, and a scorer without a base.

        Raises:
            ConfigError: with the key, what it got and what it wants.
        """
        if settings.artifacts.ppo is not None:
            raise ConfigError(
                f"artifacts.ppo={settings.artifacts.ppo}: DPO starts from artifacts.sft, which is "
                "its reference too; name the policy there"
            )
        kind, given = settings.hparams.kind, settings.data.get("kind") or "preferences"
        wanted = "unpaired" if kind == "kto" else "preferences"
        if given != wanted:
            raise ConfigError(f"data.kind={given}: module.dpo.kind={kind} wants data.kind={wanted}")
        scorer = settings.scorer
        if scorer is not None and getattr(scorer.read().call, "holds", None) == "adapter":
            raise ConfigError(
                f"scorer={scorer.class_name} needs the base of PPO's policy: use "
                "scorer=reward_model"
            )

    def finish(
        self, settings: TrainSettings, folder: RunFolder, parts: TrainingComponents
    ) -> Findings:
        """Compare the policy with its start, by gold and by a scorer if any."""
        baseline = start_policy(settings, parts)
        if settings.scorer is not None:
            parts.scorer = settings.scorer.build()
            for model in parts.scorer.build():
                placed(parts, model)
        return compare(settings, parts, baseline)

    def start_lines(self, settings: TrainSettings) -> dict[str, object]:
        """Return the objective."""
        dpo = settings.hparams
        wrong = f", {100 * dpo.label_smoothing:g} % of labels wrong" if dpo.label_smoothing else ""
        return {"objective": f"{dpo.kind}, beta {dpo.beta:g}{wrong}"}


STAGE = DPOStage()
