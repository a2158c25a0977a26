"""Supervised fine-tuning: cross-entropy on response tokens, EOS included.

Legend: B rows, T tokens, W bucket width, N labels, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self, Unpack

import torch
from torch import Tensor
from torchmetrics import SumMetric
from transformers import PreTrainedTokenizerBase

from rlhf_lightning.arguments import PathOrName, checked
from rlhf_lightning.batches import SFTBatch
from rlhf_lightning.data.datamodules import DemonstrationDataModule
from rlhf_lightning.distributed.collectives import global_sum
from rlhf_lightning.functional.sequences import next_token_labels
from rlhf_lightning.hparams import SFTHparams
from rlhf_lightning.models.factory import load_policy
from rlhf_lightning.models.forward import micro_batches, pack_right, pack_together, packs
from rlhf_lightning.models.heads import PolicyModel
from rlhf_lightning.modules import pretrained
from rlhf_lightning.modules.base import RLHFModule
from rlhf_lightning.modules.optimization import Measured
from rlhf_lightning.modules.options import ModuleOptions, ModuleParts


class SFTModule(RLHFModule):
    """Learns to continue prompts like the demonstrations.

    Args:
        sft: hyper-parameters of SFT.
        policy: builder of the model.
        parts: further parts, see `ModuleParts`.
    """

    stage = "sft"
    title = "supervised fine-tuning"
    kinds: ClassVar = {"sft": SFTHparams}
    data = DemonstrationDataModule
    batch = SFTBatch
    rate = "sft"
    unit = "tokens"
    starts_from = "base"
    objective = "val/loss"
    maximised = False
    algorithm: SFTHparams
    policy: PolicyModel | None

    @checked
    def __init__(
        self, *, sft: SFTHparams, policy: Callable[[], PolicyModel], **parts: Unpack[ModuleParts]
    ) -> None:
        super().__init__(sft, policy, **parts)
        self.policy = None
        names = ("loss", "tokens")  # two sums: a MeanMetric that keeps NaN forgets its weights
        self.sums = torch.nn.ModuleDict({name: SumMetric("disable") for name in names})

    @classmethod
    @checked
    def from_pretrained(
        cls,
        source: PathOrName | None = None,
        *,
        from_scratch: Mapping[str, Any] | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        sft: SFTHparams | None = None,
        **options: Unpack[ModuleOptions],
    ) -> Self:
        """Return the module that fine-tunes `source`; weights are loaded when training starts.

        Args:
            source: folder or hub name of the model to start from.
            from_scratch: in place of `source`, the config of a model with random weights: its
                fields with `model_type`, such as `{"model_type": "llama", "hidden_size": 64}`.
            tokenizer: of that model, which takes its vocabulary from it.
            sft: hyper-parameters; the defaults of `SFTHparams`.
            options: further options, see `ModuleOptions`.

        Raises:
            ValueError: unless exactly one of `source` and `from_scratch` is given, or if the model
                cannot be read.
        """
        if (source is None) == (from_scratch is None):
            raise ValueError("give one of source=, a folder or hub name, and from_scratch=")
        if from_scratch is not None:
            start = pretrained.Start.scratch(from_scratch, tokenizer, options)
        elif source is not None and tokenizer is None:
            start = pretrained.Start.read(source, "source", options)
        else:
            raise ValueError(f"tokenizer is that of from_scratch: source={source} has its own")
        hparams = {"sft": sft or SFTHparams()}
        return pretrained.of_one_model(cls, start, load_policy, "policy", hparams)

    def training_step(self, batch: SFTBatch, batch_idx: int) -> dict[str, Tensor]:
        """Take one optimizer step on the batch."""
        num_tokens = global_sum(batch.loss_mask.sum())
        size, packed = self.algorithm.micro_batch_size, packs(self.policy)
        parts = micro_batches(batch.attention_mask, size, packed=packed)
        return self.learn(batch, batch_idx, parts, self.term, num_tokens, size=num_tokens)

    def term(self, micro_batch: SFTBatch, num_tokens: Tensor) -> tuple[Tensor, Measured]:
        """Return a micro-batch's share of the loss, with its measure."""
        loss = self.loss(micro_batch, num_tokens)
        return loss, {"sft/loss": loss}

    def loss(
        self, batch: SFTBatch, num_tokens: Tensor, policy: PolicyModel | None = None
    ) -> Tensor:
        """Return the sum of the rows' token losses over `num_tokens`, nats per token.

        Args:
            batch: batch of demonstrations.
            num_tokens: divisor of the sum.
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
        self.log_validation_time()
