"""Log-probabilities of preference pairs under the reference, computed once, before the first step.

The reference is the policy that training starts from. It is in memory only while they are computed;
with adapters it is the base with its adapters off. A run that is resumed computes them again.

Legend: N rows of a split, b rows of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from rlhf_lightning.batches import PreferenceBatch
from rlhf_lightning.data.encode import EncodedPreference
from rlhf_lightning.distributed.collectives import agreed_max, global_sum, rank, world_size
from rlhf_lightning.models.building import place_on_ranks
from rlhf_lightning.models.factory import frozen
from rlhf_lightning.models.forward import by_micro_batch, response_logprobs
from rlhf_lightning.models.heads import PolicyModel
from rlhf_lightning.models.lora import AdaptedPolicy
from rlhf_lightning.models.precision import release_freed_memory
from rlhf_lightning.modules.base import RLHFModule
from rlhf_lightning.modules.placement import move_models

SPLITS = ("train", "validation")
ROWS_TOGETHER = 256  # of a rank, that are padded to one width
Rows = Sequence[EncodedPreference]


def side_logprobs(policy: PolicyModel, batch: PreferenceBatch, side: str) -> Tensor:
    """Return log-probabilities `[b]` of the responses on a side, `chosen` or `rejected`."""
    ids, mask = getattr(batch, f"{side}_input_ids"), getattr(batch, f"{side}_attention_mask")
    return response_logprobs(policy, ids, mask, getattr(batch, f"{side}_length"))


def pair_logprobs(policy: PolicyModel, batch: PreferenceBatch) -> tuple[Tensor, Tensor]:
    """Return log-probabilities `[b]` of the chosen and rejected responses, in one forward."""
    ids = torch.cat([batch.chosen_input_ids, batch.rejected_input_ids])  # [2b, T]
    mask = torch.cat([batch.chosen_attention_mask, batch.rejected_attention_mask])
    lengths = torch.cat([batch.chosen_length, batch.rejected_length])
    chosen, rejected = response_logprobs(policy, ids, mask, lengths).chunk(2)
    return chosen, rejected


class ReferenceLogprobs:
    """Tables `[N, 2]` of a run, by split: log-probabilities of both responses of each row.

    Rows that no batch needs are NaN.

    Args:
        build: builder of the reference.
        micro_batch_size: pairs in one forward.
    """

    def __init__(self, build: Callable[[], PolicyModel], micro_batch_size: int | None) -> None:
        self.build = build
        self.micro_batch_size = micro_batch_size
        self.tables: dict[str, Tensor] = {}

    def of(self, batch: PreferenceBatch, split: str) -> tuple[Tensor, Tensor]:
        """Return log-probabilities `[b]` of the chosen and of the rejected responses of a batch."""
        chosen, rejected = self.tables[split][batch.row_ids].unbind(-1)
        return chosen, rejected

    def prepare(self, module: RLHFModule, splits: Sequence[str]) -> None:
        """Compute the log-probabilities of the rows that a run reads; each rank its share.

        Args:
            module: module that is trained; every rank calls.
            splits: required splits: all held-out rows, and the training rows of the run.

        Raises:
            ValueError: if the rows do not come from a `PreferenceDataModule`, or if the reference
                is not finite.
        """
        trainer: Any = module.trainer
        data = trainer.datamodule
        if data is None:
            raise ValueError(
                "DPO finds the reference by row: give fit or validate a PreferenceDataModule"
            )
        wanted: dict[str, Sequence[int]] = {split: range(len(data.rows(split))) for split in splits}
        if "train" in wanted:
            wanted["train"] = data.rows_of_batches(int(trainer.num_training_batches))
        count = sum(map(len, wanted.values()))
        rank_zero_info(f"Log-probabilities of {count:,} rows under the reference, once")
        reference = self._reference(module)
        with torch.no_grad(), trainer.strategy.precision_plugin.forward_context():
            for split, numbers in wanted.items():
                rows = data.rows(split)
                table = torch.full((len(rows), 2), torch.nan)
                asked, collate = [rows[row] for row in numbers], data.collator(training=True)
                table[list(numbers)] = self._of_rows(reference, asked, collate, module.device)
                if not table[list(numbers)].isfinite().all():
                    raise ValueError(
                        "the reference gives non-finite log-probabilities to responses of the "
                        "data: its weights are damaged or have diverged, start from another policy"
                    )
                self.tables[split] = table.to(module.device)
        del reference
        release_freed_memory()

    def _reference(self, module: RLHFModule) -> PolicyModel:
        policy = module.policy
        if isinstance(policy, AdaptedPolicy):
            return frozen(AdaptedPolicy(policy.base, None))
        with module.sharing_models():
            reference = place_on_ranks(frozen(self.build()), frozen=True)
        move_models(module, [reference])
        return reference

    def _of_rows(
        self, reference: PolicyModel, rows: Rows, collate: Callable[..., Any], device: torch.device
    ) -> Tensor:
        """Return `[len(rows), 2]` on the CPU, the same on all ranks."""
        found = torch.zeros(len(rows), 2)
        order = sorted(range(len(rows)), key=lambda row: len(rows[row]))
        share = order[rank() :: world_size()]
        for start in range(0, -(-len(rows) // world_size()), ROWS_TOGETHER):
            # A rank without a row left repeats one: ranks that shard compute together.
            chosen = share[start : start + ROWS_TOGETHER] or order[:1]
            batch = collate([rows[row] for row in chosen]).to(device)
            columns = by_micro_batch(
                lambda part, batch=batch: pair_logprobs(reference, batch[part]),  # type: ignore[misc]
                batch.either_attention_mask,
                self.micro_batch_size,
                agree=agreed_max,
            )
            if start < len(share):
                found[chosen] = torch.stack(columns, -1).float().cpu()
        return global_sum(found.to(device)).cpu()
