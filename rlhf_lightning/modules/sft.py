"""Supervised fine-tuning: cross-entropy on response tokens, EOS included.

Legend: B rows, T tokens, W bucket width, N labels, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torchmetrics import SumMetric
from transformers import PreTrainedTokenizerBase

from rlhf_lightning.arguments import PathOrName, RunsCode, Seed, checked
from rlhf_lightning.batches import SFTBatch
from rlhf_lightning.distributed.collectives import global_sum
from rlhf_lightning.functional.sequences import next_token_labels
from rlhf_lightning.hparams import LoraHparams, SFTHparams
from rlhf_lightning.models.factory import load_policy
from rlhf_lightning.models.forward import micro_batches, pack_right, pack_together, packs
from rlhf_lightning.models.heads import PolicyModel
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
from rlhf_lightning.modules.pretrained import Optimizer
from rlhf_lightning.modules.schedules import Schedule


class SFTModule(OneModelModule):
    """Learns to continue prompts as the demonstrations do.

    Args:
        sft: hyper-parameters.
        policy: builds the model.
        optimizer: parameter groups -> optimizer.
        schedule: factor on the learning rate over iterations.
        fingerprint: of the model's source; adapters resume only on the base they were trained on.
        compute_dtype: of sharded forwards.
    """

    stage = "sft"
    kinds: ClassVar = {"sft": SFTHparams}

    @checked
    def __init__(
        self,
        *,
        sft: SFTHparams,
        policy: Callable[[], PolicyModel],
        optimizer: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
        schedule: Schedule,
        fingerprint: str = "",
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.sft = sft
        self.build_policy = policy
        self.build_optimizer = optimizer
        self.schedule = schedule
        self.fingerprint = fingerprint
        self.compute_dtype = compute_dtype
        self.tokenizer: PreTrainedTokenizerBase | None = None
        self.gaps = Gaps()
        self.skipped = SkippedSteps(sft.max_skipped_steps, "module.sft.max_skipped_steps")
        self.policy: PolicyModel | None = None
        names = ("loss", "tokens")  # two sums: a MeanMetric that keeps NaN forgets its weights
        self.sums = torch.nn.ModuleDict({name: SumMetric("disable") for name in names})

    @classmethod
    @checked
    def from_pretrained(
        cls,
        source: PathOrName,
        *,
        sft: SFTHparams | None = None,
        lora: LoraHparams | None = None,
        schedule: Schedule | None = None,
        optimizer: Optimizer | None = None,
        seed: Seed = 1,
        activation_checkpointing: bool = False,
        chat_template: str | None = None,
        revision: str | None = None,
        trust_remote_code: RunsCode = False,
    ) -> Self:
        """Return the module that fine-tunes `source`; weights are loaded when training starts.

        Args:
            source: folder or hub name of the model to start from.
            sft: hyper-parameters; the defaults of `SFTHparams`.
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
            argument="policy",
            load=load_policy,
            hparams={"sft": sft or SFTHparams()},
            lora=lora,
            schedule=schedule,
            optimizer=optimizer,
            seed=seed,
            activation_checkpointing=activation_checkpointing,
            chat_template=chat_template,
            revision=revision,
            trust_remote_code=trust_remote_code,
        )

    def configure_optimizers(self) -> dict[str, Any]:
        """One group; the schedule counts iterations."""
        group = parameter_group(self.policy, "sft", self.sft.learning_rate)
        return with_schedule(self, self.build_optimizer([group]), self.schedule)

    def training_step(self, batch: SFTBatch, batch_idx: int) -> None:
        """Take one optimizer step on the batch."""
        check_batch(self, batch, SFTBatch)
        started = time.perf_counter()
        num_tokens = global_sum(batch.loss_mask.sum())
        parts = micro_batches(
            batch.attention_mask, self.sft.micro_batch_size, packed=packs(self.policy)
        )

        def loss_of_rows(rows: Tensor) -> tuple[Tensor, Measured]:
            loss = self.loss(batch[rows], num_tokens)
            return loss, {"sft/loss": loss}

        measured = accumulate_gradients(self, parts, [loss_of_rows])
        learning_rate = self.optimizers().param_groups[0]["lr"]
        norms = clip_and_step(
            self,
            {"sft/grad_norm": self.policy},
            self.sft.max_grad_norm,
            lambda norms: self.skipped.should_step(measured | norms, batch, batch_idx),
        )
        self.lr_schedulers().step()
        seconds = time.perf_counter() - started
        measures = finite(measured | (norms or {})) | {
            "sft/skipped_steps": self.skipped.end_iteration(),
            "sft/learning_rate": learning_rate,
            "time/update": seconds,
            "throughput/tokens_per_second": float(num_tokens) / seconds,
        }
        self.log_dict(self.gaps.filled(measures))

    def loss(
        self, batch: SFTBatch, num_tokens: Tensor, policy: PolicyModel | None = None
    ) -> Tensor:
        """Return the sum of the rows' token losses over `num_tokens`, nats per token.

        Args:
            batch: of demonstrations.
            num_tokens: what the sum is divided by.
            policy: another model than the one that is trained.
        """
        model = self.policy if policy is None else policy
        labels = next_token_labels(batch.input_ids, batch.loss_mask)  # [B, T]
        row, column = (labels >= 0).nonzero(as_tuple=True)
        tokens = labels[row, column]  # [N]
        row_lengths = None
        if packs(model):
            input_ids, offsets, row_lengths = pack_together(batch.input_ids, batch.attention_mask)
            positions = offsets[row] + column
        else:
            input_ids = pack_right(batch.input_ids, batch.attention_mask)  # [B, W]
            positions = row * input_ids.shape[1] + column
        statistics = model(input_ids, positions, tokens, 1.0, False, row_lengths)
        return -statistics.logprobs.sum() / num_tokens.clamp(min=1)

    def validation_step(self, batch: SFTBatch, batch_idx: int) -> None:
        """Add the batch to the held-out loss."""
        num_tokens = batch.loss_mask.sum()
        self.sums["loss"].update(self.loss(batch, num_tokens).float() * num_tokens)
        self.sums["tokens"].update(num_tokens)

    def on_validation_epoch_end(self) -> None:
        """Log the token mean over all held-out rows of all ranks."""
        loss = self.sums["loss"].compute() / self.sums["tokens"].compute()
        self.log("val/loss", loss, prog_bar=True)
        if self.trainer.state.fn == "fit":  # not of a validation by itself
            self.log("time/validate", time.perf_counter() - self.validation_started)
