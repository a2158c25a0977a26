"""Pairwise reward model: Bradley-Terry on the scores of two responses to one prompt.

Legend: B pairs, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Self, Unpack

import torch
from torch import Tensor
from torchmetrics import SumMetric
from torchmetrics.classification import BinaryCalibrationError

from rlhf_lightning.arguments import Fraction, PathOrName, checked
from rlhf_lightning.batches import PreferenceBatch
from rlhf_lightning.data.datamodules import PreferenceDataModule
from rlhf_lightning.distributed.collectives import gathered, global_sum
from rlhf_lightning.functional.preference_losses import pairwise_reward_loss
from rlhf_lightning.functional.statistics import interval_over_groups
from rlhf_lightning.hparams import RewardHparams
from rlhf_lightning.models.building import place_on_ranks
from rlhf_lightning.models.factory import load_scalar_model
from rlhf_lightning.models.forward import packs, pair_micro_batches, sequence_scores
from rlhf_lightning.models.heads import ScalarHeadModel
from rlhf_lightning.models.micro_batching import in_buckets, token_budget
from rlhf_lightning.modules import pretrained
from rlhf_lightning.modules.base import RLHFModule
from rlhf_lightning.modules.optimization import Measured
from rlhf_lightning.modules.options import ModuleOptions, ModuleParts

CONFIDENCE = 0.95


class RewardModule(RLHFModule):
    """Learns which of two responses people prefer.

    Args:
        reward: hyper-parameters of the reward model.
        model: builder of decoder and scalar head.
        parts: further parts, see `ModuleParts`.

    Source: Ouyang et al. 2022, equation 1; Eisenstein et al. 2023 for `center_coef`.
    """

    stage = "reward"
    title = "reward model"
    kinds: ClassVar = {"reward": RewardHparams}
    data = PreferenceDataModule
    batch = PreferenceBatch
    rate = "reward"
    trains_policy = False
    objective = "val/accuracy"
    algorithm: RewardHparams

    @checked
    def __init__(
        self,
        *,
        reward: RewardHparams,
        model: Callable[[], ScalarHeadModel],
        **parts: Unpack[ModuleParts],
    ) -> None:
        super().__init__(reward, model, **parts)
        self.model: ScalarHeadModel = None  # before configure_model
        names = ("margin", "loss", "longer_wins_accuracy")
        self.sums = torch.nn.ModuleDict({name: SumMetric("disable") for name in names})
        self.calibration = BinaryCalibrationError(n_bins=10, norm="l1")
        self.validated: list[tuple[bytes, bool]] = []  # prompt of a pair, whether it is right

    @classmethod
    @checked
    def from_pretrained(
        cls,
        source: PathOrName,
        *,
        reward: RewardHparams | None = None,
        dropout: Fraction = 0.0,
        **options: Unpack[ModuleOptions],
    ) -> Self:
        """Return the module that makes a reward model of `source`, loaded when training starts.

        Args:
            source: folder or hub name of the model to start from.
            reward: hyper-parameters; the defaults of `RewardHparams`.
            dropout: probability of every dropout in the model's config, during training.
            options: further options, see `ModuleOptions`.
        """
        load = partial(load_scalar_model, head="reward")
        hparams = {"reward": reward or RewardHparams()}
        start = pretrained.Start.read(source, "source", options)
        return pretrained.of_one_model(cls, start, load, "model", hparams, dropout=dropout)

    @classmethod
    def kinds_of_records(cls, algorithm: Any) -> tuple[str, ...]:
        """Return pairs alone."""
        return ("preferences",)

    @property
    def trained(self) -> Any:
        """The model."""
        return self.model

    def take(self, built: ScalarHeadModel) -> None:
        """Take what `build_models` has built."""
        self.model = built
        place_on_ranks(built.root)

    def training_step(self, batch: PreferenceBatch, batch_idx: int) -> dict[str, Tensor]:
        """Take one optimizer step on the batch of pairs."""
        num_pairs = global_sum(torch.tensor(float(len(batch)), device=self.device))
        parts = self._micro_batches(batch)
        return self.learn(batch, batch_idx, parts, self.loss, num_pairs, size=num_pairs)

    def loss(self, pairs: PreferenceBatch, num_pairs: Tensor) -> tuple[Tensor, Measured]:
        """Return the sum of the pairs' losses over `num_pairs`, and further sums over the same."""
        chosen, rejected = self.scores(pairs)
        result = pairwise_reward_loss(
            chosen,
            rejected,
            margin=pairs.margin if self.algorithm.use_margin else None,
            label_smoothing=self.algorithm.label_smoothing,
            center_coef=self.algorithm.center_coef,
        )
        share = len(pairs) / num_pairs
        measures = {
            "reward/loss": result.loss * share,
            "reward/accuracy": result.accuracy * share,
            "reward/margin": result.margin * share,
        }
        return result.loss * share, measures

    def _micro_batches(self, batch: PreferenceBatch) -> list[Tensor]:
        """Return the rows of each forward; without a bound all where half are saved or more."""
        numbers = response_numbers(batch)
        unique = len(set(numbers))
        fits = (
            in_buckets(self.device.type)
            or unique * batch.chosen_attention_mask.shape[1] <= token_budget()
        )
        # One batch is padded to its longest row, so a single repeated response is not worth it.
        if self.algorithm.micro_batch_size is None and 0 < 2 * unique <= len(numbers) and fits:
            return [torch.arange(len(batch))]
        return pair_micro_batches(
            batch.chosen_attention_mask,
            batch.rejected_attention_mask,
            self.algorithm.micro_batch_size,
            packed=packs(self.model),
        )

    def scores(self, batch: PreferenceBatch) -> tuple[Tensor, Tensor]:
        """Return the scores `[B]` of the chosen and of the rejected responses, in one forward.

        A response in several of the pairs goes through the model once (Ouyang et al. 2022, section
        3.5).
        """
        ids = torch.cat([batch.chosen_input_ids, batch.rejected_input_ids])  # [2B, T]
        mask = torch.cat([batch.chosen_attention_mask, batch.rejected_attention_mask])
        numbers = response_numbers(batch)
        place = {number: i for i, number in enumerate(dict.fromkeys(numbers))}
        again = len(place) < len(numbers)
        if again:
            once = torch.tensor([numbers.index(number) for number in place])
            once = once.to(ids.device, non_blocking=True)
            ids, mask = ids[once], mask[once]
        scores = sequence_scores(self.model, ids, mask, packed=packs(self.model))
        if again:
            pairs = torch.tensor([place[number] for number in numbers])
            scores = scores[pairs.to(ids.device, non_blocking=True)]
        chosen, rejected = scores.chunk(2)
        return chosen, rejected

    def on_validation_start(self) -> None:
        """Start the clock, place the base, and forget what was measured."""
        super().on_validation_start()
        self.calibration.reset()
        self.validated = []

    def validation_step(self, batch: PreferenceBatch, batch_idx: int) -> None:
        """Add the held-out pairs to the sums."""
        chosen, rejected = self.scores(batch)
        difference = chosen - rejected  # [B]
        longer = batch.chosen_length - batch.rejected_length
        values = {
            "margin": difference,
            "loss": torch.nn.functional.softplus(-difference),
            "longer_wins_accuracy": (longer.sign() + 1) / 2,  # which of equal lengths is a guess
        }
        for name, value in values.items():
            self.sums[name].update(value.float())
        self.validated += zip(batch.prompt_keys, (difference > 0).tolist(), strict=True)
        # Both orders of each pair: calibration must not depend on which response comes first.
        difference = difference[difference.isfinite()]
        # Below 1: torchmetrics gives a probability of exactly 1 a bin of its own.
        probability = torch.cat([difference, -difference]).clamp(max=16).sigmoid()
        target = torch.cat([torch.ones_like(difference), torch.zeros_like(difference)]).long()
        self.calibration.update(probability, target)

    def on_validation_epoch_end(self) -> None:
        """Log accuracy with its interval, margin, calibration, and "the longer one wins"."""
        validated = [pair for part in gathered(self.validated) for pair in part]
        prompts, right = zip(*validated, strict=True)
        pairs = len(right)
        low, high = interval_over_groups(right, prompts, confidence=CONFIDENCE)
        measures = {
            "val/num_pairs": float(pairs),
            "val/num_pair_prompts": float(len({*prompts})),
            "val/accuracy": sum(right) / pairs,
            "val/accuracy_low": low,
            "val/accuracy_high": high,
            "val/calibration_error": float(self.calibration.compute()),
            **{f"val/{name}": float(sum_.compute()) / pairs for name, sum_ in self.sums.items()},
        }
        self.log_dict(measures)
        self.log_validation_time()


def response_numbers(batch: PreferenceBatch) -> list[int]:
    """Return `[2B]` numbers of the chosen and then of the rejected responses; [] if not known."""
    return [number for side in zip(*batch.answer_ids or (), strict=True) for number in side]
