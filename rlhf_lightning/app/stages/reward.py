"""Reward modelling: from a policy to a model that scores responses, on preference pairs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, cast

from rlhf_lightning.app.config.settings import TrainSettings
from rlhf_lightning.app.evaluation import placed, prompt_length, start_policy, validate
from rlhf_lightning.app.stages.spec import SCALAR, Stage, TrainingComponents
from rlhf_lightning.data.encode import EncodedPreference
from rlhf_lightning.evaluation.final_metrics import Findings
from rlhf_lightning.evaluation.normalization import fold_normalization, normalization_prompts
from rlhf_lightning.evaluation.reward_accuracy import (
    ScoredPair,
    comparable_rows,
    held_out_pairs,
    score_pairs,
    share_right,
)
from rlhf_lightning.models.factory import frozen, load_scalar_model
from rlhf_lightning.models.heads import ScalarHeadModel
from rlhf_lightning.modules.reward import RewardModule
from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.text.tokenizers import check_same_tokenizer

MOST_TRAINING_PAIRS = 1000  # that are scored once more, to hold against held-out ones


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
        """Validate, estimate the noise of the labels, and normalize."""
        metrics, values = validate(parts), dict[str, Any]()
        model = cast(RewardModule, parts.module).model
        ceiling = getattr(parts.data.source, "label_ceiling", None)
        if ceiling is not None:
            metrics["val/label_ceiling"] = float(ceiling())
        if rows := cast("Sequence[EncodedPreference]", parts.data.rows("validation")):
            measures, values = held_out_pairs(
                placed(parts, model),
                rows,
                parts.tokenizer,
                batch_size=settings.evaluation.batch_size,
            )
            metrics |= measures
            metrics |= _evidence(settings, parts, rows)
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
        return Findings(metrics, values=values)

    def num_answered(self, settings: TrainSettings) -> int:
        """Return how many training prompts are answered to normalize the scores."""
        return int(settings.hparams.normalization_samples)

    def start_notes(self, settings: TrainSettings, num_rows: int, held_out: int) -> list[str]:
        """Return what asks for more prompts than there are."""
        samples = self.num_answered(settings)
        if samples <= num_rows:
            return []
        return [
            f"module.reward.normalization_samples={samples} is more than the {num_rows:,} training "
            "records: prompts are answered several times, each time anew"
        ]


def _evidence(
    settings: TrainSettings, parts: TrainingComponents, rows: Sequence[EncodedPreference]
) -> dict[str, float]:
    """Return what tells overfitting, noise and too small a model apart."""
    train = cast("Sequence[EncodedPreference]", parts.data.rows("train"))
    found = {}
    if seen := comparable_rows(train, rows, count=min(len(rows), MOST_TRAINING_PAIRS)):
        found["val/train_accuracy"] = share_right(
            _scored(settings, parts, cast(RewardModule, parts.module).model, seen)
        )
    source = settings.evaluation.larger_reward_model
    if source is not None:
        fix = "train it on the same policy's tokenizer"
        check_same_tokenizer(parts.tokenizer, source, fix=fix)
        larger = frozen(load_scalar_model(source))
        found["val/larger_model_accuracy"] = share_right(_scored(settings, parts, larger, rows))
    return found


def _scored(
    settings: TrainSettings,
    parts: TrainingComponents,
    model: ScalarHeadModel,
    rows: Sequence[EncodedPreference],
) -> list[ScoredPair]:
    return score_pairs(
        placed(parts, model),
        rows,
        batch_size=settings.evaluation.batch_size,
        pad_token_id=int(parts.tokenizer.pad_token_id),  # type: ignore[arg-type]
    )


STAGE = RewardStage()
