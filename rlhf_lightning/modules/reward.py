"""Pairwise reward model: Bradley-Terry on the scores of two answers to one prompt.

Legend: B pairs, T tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torchmetrics import SumMetric
from torchmetrics.classification import BinaryCalibrationError
from transformers import PreTrainedTokenizerBase

from rlhf_lightning.arguments import PathOrName, RunsCode, Seed, checked
from rlhf_lightning.batches import PreferenceBatch
from rlhf_lightning.distributed.collectives import global_sum
from rlhf_lightning.functional.preference_losses import pairwise_reward_loss
from rlhf_lightning.functional.statistics import wilson_interval
from rlhf_lightning.hparams import LoraHparams, RewardHparams
from rlhf_lightning.models.building import completed
from rlhf_lightning.models.factory import load_scalar_model
from rlhf_lightning.models.forward import packs, pair_micro_batches, sequence_scores
from rlhf_lightning.models.heads import ScalarHeadModel
from rlhf_lightning.modules import pretrained
from rlhf_lightning.modules.base import OneModelModule
from rlhf_lightning.modules.data_checks import check_batch
from rlhf_lightning.modules.metrics import Gaps
from rlhf_lightning.modules.non_finite import SkippedSteps, finite
from rlhf_lightning.modules.optimization import (
    Measured,
    accumulate_gradients,
    clip_and_step,
    parameter_group,
    with_schedule,
)
from rlhf_lightning.modules.placement import sharing_models
from rlhf_lightning.modules.pretrained import Optimizer
from rlhf_lightning.modules.schedules import Schedule

CONFIDENCE = 0.95


class RewardModule(OneModelModule):
    """Learns which of two answers people prefer.

    Args:
        reward: hyper-parameters.
        model: builds decoder and scalar head.
        optimizer: parameter groups -> optimizer.
        schedule: factor on the learning rate over iterations.
        fingerprint: of the model's source; adapters resume only on the base they were trained on.
        compute_dtype: of sharded forwards.

    Source: Ouyang et al. 2022, equation 1; Eisenstein et al. 2023 for `center_coef`.
    """

    stage = "reward"
    kinds: ClassVar = {"reward": RewardHparams}
    record_kinds = ("preferences",)

    @checked
    def __init__(
        self,
        *,
        reward: RewardHparams,
        model: Callable[[], ScalarHeadModel],
        optimizer: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
        schedule: Schedule,
        fingerprint: str = "",
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.reward = reward
        self.build_model = model
        self.build_optimizer = optimizer
        self.schedule = schedule
        self.fingerprint = fingerprint
        self.compute_dtype = compute_dtype
        self.tokenizer: PreTrainedTokenizerBase | None = None
        self.gaps = Gaps()
        self.skipped = SkippedSteps(reward.max_skipped_steps, "module.reward.max_skipped_steps")
        self.model: ScalarHeadModel | None = None
        names = ("pairs", "right", "ties", "margin", "loss", "unequal", "longer_right")
        self.sums = torch.nn.ModuleDict({name: SumMetric("disable") for name in names})
        self.calibration = BinaryCalibrationError(n_bins=10, norm="l1")

    @classmethod
    @checked
    def from_pretrained(
        cls,
        source: PathOrName,
        *,
        reward: RewardHparams | None = None,
        lora: LoraHparams | None = None,
        schedule: Schedule | None = None,
        optimizer: Optimizer | None = None,
        seed: Seed = 1,
        activation_checkpointing: bool = False,
        chat_template: str | None = None,
        revision: str | None = None,
        trust_remote_code: RunsCode = False,
    ) -> Self:
        """Return the module that makes a reward model of `source`, loaded when training starts.

        Args:
            source: folder or hub name of the model to start from.
            reward: hyper-parameters; the defaults of `RewardHparams`.
            lora: train an adapter on the frozen model instead of the model.
            schedule: of the learning rate; linear to 0 by default.
            optimizer: parameter groups, which hold the learning rates -> optimizer; AdamW by
                default.
            seed: of new weights, and of the order of the data.
            activation_checkpointing: compute decoder layers again in the backward pass.
            chat_template: file of a template, or the name of one of ours, in place of the
                model's; exported with it.
            revision: branch, tag or commit of a hub name.
            trust_remote_code: run the code beside the weights.
        """
        return pretrained.one_model_module(
            cls,
            source,
            argument="model",
            load=partial(load_scalar_model, head="reward"),
            hparams={"reward": reward or RewardHparams()},
            lora=lora,
            schedule=schedule,
            optimizer=optimizer,
            seed=seed,
            activation_checkpointing=activation_checkpointing,
            chat_template=chat_template,
            revision=revision,
            trust_remote_code=trust_remote_code,
        )

    @property
    def trained(self) -> Any:
        """The model."""
        return self.model

    def configure_model(self) -> None:
        """Build the model, and shard it if ranks share it."""
        if self.model is None:
            with sharing_models(self):
                self.model = self.build_model()
                completed(self.model.root)

    def configure_optimizers(self) -> dict[str, Any]:
        """One group; the schedule counts iterations."""
        group = parameter_group(self.model, "reward", self.reward.learning_rate)
        return with_schedule(self, self.build_optimizer([group]), self.schedule)

    def training_step(self, batch: PreferenceBatch, batch_idx: int) -> None:
        """Take one optimizer step on the batch of pairs."""
        check_batch(self, batch, PreferenceBatch)
        started = time.perf_counter()
        num_pairs = global_sum(torch.tensor(float(len(batch)), device=self.device))
        parts = self._micro_batches(batch)

        def loss_of_rows(rows: Tensor) -> tuple[Tensor, Measured]:
            chosen, rejected = self.scores(batch[rows])
            result = pairwise_reward_loss(
                chosen,
                rejected,
                margin=batch.margin[rows] if self.reward.use_margin else None,
                label_smoothing=self.reward.label_smoothing,
                center_coef=self.reward.center_coef,
            )
            share = len(rows) / num_pairs
            measures = {
                "reward/loss": result.loss * share,
                "reward/accuracy": result.accuracy * share,
                "reward/margin": result.margin * share,
            }
            return result.loss * share, measures

        measured = accumulate_gradients(self, parts, [loss_of_rows])
        learning_rate = self.optimizers().param_groups[0]["lr"]
        norms = clip_and_step(
            self,
            {"reward/grad_norm": self.model},
            self.reward.max_grad_norm,
            lambda norms: self.skipped.should_step(measured | norms, batch, batch_idx),
        )
        self.lr_schedulers().step()
        seconds = time.perf_counter() - started
        measures = finite(measured | (norms or {})) | {
            "reward/skipped_steps": self.skipped.end_iteration(),
            "reward/learning_rate": learning_rate,
            "time/update": seconds,
            "throughput/pairs_per_second": float(num_pairs) / seconds,
        }
        self.log_dict(self.gaps.filled(measures))

    def _micro_batches(self, batch: PreferenceBatch) -> list[Tensor]:
        """Return the rows of each forward; without a bound all where half are saved or more."""
        numbers = answer_numbers(batch)
        # All at once are padded to the longest, so one answer that comes twice is no reason.
        if self.reward.micro_batch_size is None and 0 < 2 * len(set(numbers)) <= len(numbers):
            return [torch.arange(len(batch))]
        return pair_micro_batches(
            batch.chosen_attention_mask,
            batch.rejected_attention_mask,
            self.reward.micro_batch_size,
            packed=packs(self.model),
        )

    def scores(self, batch: PreferenceBatch) -> tuple[Tensor, Tensor]:
        """Return the scores `[B]` of the chosen and of the rejected answers, in one forward.

        An answer that stands in several of the pairs goes through the model once (Ouyang et al.
        2022, section 3.5).
        """
        ids = torch.cat([batch.chosen_input_ids, batch.rejected_input_ids])  # [2B, T]
        mask = torch.cat([batch.chosen_attention_mask, batch.rejected_attention_mask])
        numbers = answer_numbers(batch)
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

    def validation_step(self, batch: PreferenceBatch, batch_idx: int) -> None:
        """Add the held-out pairs to the measures."""
        chosen, rejected = self.scores(batch)
        difference = chosen - rejected  # [B]
        longer = batch.chosen_length - batch.rejected_length
        values = {
            "pairs": torch.ones_like(difference),
            "right": difference > 0,
            "ties": difference == 0,
            "margin": difference,
            "loss": torch.nn.functional.softplus(-difference),
            "unequal": longer != 0,
            "longer_right": longer > 0,
        }
        for name, value in values.items():
            self.sums[name].update(value.float())
        # Both orders of each pair: calibration must not depend on which answer comes first.
        difference = difference[difference.isfinite()]
        probability = torch.cat([difference, -difference]).sigmoid()
        target = torch.cat([torch.ones_like(difference), torch.zeros_like(difference)]).long()
        self.calibration.update(probability, target)

    def on_validation_epoch_end(self) -> None:
        """Log accuracy with its interval, margin, calibration, and "the longer one wins"."""
        total = {name: float(metric.compute()) for name, metric in self.sums.items()}
        pairs = total["pairs"]
        low, high = wilson_interval(total["right"], int(pairs), confidence=CONFIDENCE)
        measures = {
            "val/accuracy": total["right"] / pairs,
            "val/accuracy_low": low,
            "val/accuracy_high": high,
            "val/accuracy_ties_half": (total["right"] + 0.5 * total["ties"]) / pairs,
            "val/margin": total["margin"] / pairs,
            "val/loss": total["loss"] / pairs,
            "val/calibration_error": float(self.calibration.compute()),
            "val/longer_wins_accuracy": total["longer_right"] / max(total["unequal"], 1.0),
        }
        if self.trainer.state.fn == "fit":  # not of a validation by itself
            measures["time/validate"] = time.perf_counter() - self.validation_started
        self.log_dict(measures)


def answer_numbers(batch: PreferenceBatch) -> list[int]:
    """Return `[2B]` numbers of the chosen and then of the rejected answers; [] if not known."""
    return [number for side in zip(*batch.answer_ids or (), strict=True) for number in side]
