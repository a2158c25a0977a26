"""On-policy distillation: like GRPO, with a teacher, and with or without a reward."""

from __future__ import annotations

from rlhf_lightning.app.config.compose import ConfigError
from rlhf_lightning.app.config.settings import TrainSettings
from rlhf_lightning.app.stages.grpo import GRPOStage
from rlhf_lightning.modules.distillation import DistillationModule


class DistillationStage(GRPOStage):
    """Learns the distributions of a teacher on the responses of the policy."""

    module = DistillationModule
    family = None
    objective = "val/teacher_kl_per_token"
    maximised = False

    def check(self, settings: TrainSettings) -> None:
        """Check what GRPO's stage checks, and that there is a teacher.

        Raises:
            ConfigError: with the key, what it got and what it wants.
        """
        super().check(settings)
        if settings.module.get("teacher") is None:
            raise ConfigError(
                "artifacts.teacher=null: distillation needs a model to learn from: "
                "artifacts.teacher=FOLDER or a hub name, with the tokenizer of artifacts.sft"
            )

    def start_lines(self, settings: TrainSettings) -> dict[str, object]:
        """Return the teacher, what scores the responses, and how they are sampled."""
        return {"teacher": settings.module.get("teacher")} | super().start_lines(settings)


STAGE = DistillationStage()
