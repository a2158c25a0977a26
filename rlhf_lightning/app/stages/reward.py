"""Reward modelling: from a policy to a model that scores responses, on preference pairs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, cast

from rlhf_lightning.app.config.settings import TrainSettings
from rlhf_lightning.app.evaluation import placed, prompt_length, start_policy
from rlhf_lightning.app.stages.spec import SCALAR, Stage, TrainingComponents
from rlhf_lightning.data.encode import EncodedPreference
from rlhf_lightning.evaluation.final_metrics import Findings
from rlhf_lightning.evaluation.normalization import fold_normalization, normalization_prompts
from rlhf_lightning.evaluation.reward_accuracy import score_pairs, share_right
from rlhf_lightning.models.factory import frozen, load_scalar_model
from rlhf_lightning.modules.reward import RewardModule
from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.text.tokenizers import check_same_tokenizer


class RewardStage(Stage):
    """A Bradley-Terry reward model, normalized on responses of the policy that it starts from."""

    module = RewardModule
    rates: ClassVar = {"learning_rate": "reward"}
    starts_from = "sft"
    uses = ("sft",)
    trains = (SCALAR,)
    trained = "model"
    measures_with = ("gold", "micro_batch_size", "larger_reward_model")
    sequences_per_row = 2
    objective = "val/accuracy"

    def finish(
        self, settings: TrainSettings, folder: RunFolder, parts: TrainingComponents
    ) -> Findings:
        """Hold a larger model against it, if there is one, and normalize."""
        metrics, model = _larger_model(settings, parts), cast(RewardModule, parts.module).model
        count = self.num_answered(settings)
        if count:
            policy = start_policy(settings, parts)
            prompts = normalization_prompts(
                settings.data.source.build(),
                parts.tokenizer,
                num_samples=count,
                batch_size=settings.evaluation.batch_size,
                max_prompt_length=prompt_length(settings),
                seed=settings.seed,
                over_long=settings.data.arguments["over_long"],
            )
            metrics |= fold_normalization(
                placed(parts, model),
                placed(parts, policy),
                prompts,
                parts.sampling,
                seed=settings.seed,
            )
        return Findings(metrics)

    def num_answered(self, settings: TrainSettings) -> int:
        """Return how many training prompts are answered to normalize the scores."""
        return int(settings.hparams.normalization_samples)


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


STAGE = RewardStage()
