"""Log-probabilities of preference pairs under the reference, computed once and kept in a file.

The reference is the policy that training starts from. It is in memory only while they are computed,
before the first step; with adapters it is the base with its adapters off.

Legend: N rows of a split, b rows of a micro-batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from rlhf_lightning.batches import PreferenceBatch
from rlhf_lightning.data.encode import EncodedPreference
from rlhf_lightning.data.record_datamodule import RecordDataModule
from rlhf_lightning.distributed.collectives import agreed_max, global_sum, rank, world_size
from rlhf_lightning.models.building import place_on_ranks
from rlhf_lightning.models.factory import frozen
from rlhf_lightning.models.forward import by_micro_batch, response_logprobs
from rlhf_lightning.models.heads import PolicyModel
from rlhf_lightning.models.lora import AdaptedPolicy
from rlhf_lightning.models.precision import release_freed_memory
from rlhf_lightning.modules.base import RLHFModule
from rlhf_lightning.modules.placement import move_models
from rlhf_lightning.runs.atomic import replacing

FOLDER = "cache"  # below the Trainer's folder
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

    Rows that no batch has needed so far are NaN.

    Args:
        fingerprint: fingerprint of the reference's source.
        build: builder of the reference.
        micro_batch_size: pairs in one forward.
    """

    def __init__(
        self, fingerprint: str, build: Callable[[], PolicyModel], micro_batch_size: int | None
    ) -> None:
        self.fingerprint = fingerprint
        self.build = build
        self.micro_batch_size = micro_batch_size
        self.tables: dict[str, Tensor] = {}

    def of(self, batch: PreferenceBatch, split: str) -> tuple[Tensor, Tensor]:
        """Return log-probabilities `[b]` of the chosen and of the rejected responses of a batch."""
        chosen, rejected = self.tables[split][batch.row_ids].unbind(-1)
        return chosen, rejected

    def prepare(self, module: RLHFModule, splits: Sequence[str]) -> None:
        """Read the file of the run, compute the rows that it lacks, and write it again.

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
        rows: dict[str, Rows] = {split: data.rows(split) for split in SPLITS}
        policy = module.policy
        held = policy.base.lora.quantization if isinstance(policy, AdaptedPolicy) else ""
        computed = f"{trainer.precision} {held}"
        if module.compute_dtype is not None:  # FSDP2's, whatever the Trainer's precision
            computed += f" {module.compute_dtype}"
        key = data_key(rows, self.fingerprint, computed)
        # Runs of other data in one folder have other files.
        path = Path(trainer.default_root_dir) / FOLDER / f"reference_logprobs_{key}.safetensors"
        tables = {split: torch.full((len(rows[split]), 2), torch.nan) for split in SPLITS}
        if rank() == 0 and path.is_file():  # others may have no such disk
            try:
                tables = load_file(path)
            except (SafetensorError, OSError) as error:
                rank_zero_warn(f"{path} is damaged ({error}): it is computed again")
        tables = trainer.strategy.broadcast(tables)
        missing: dict[str, list[int]] = {}
        for split in splits:
            unknown = tables[split].isnan().any(-1).tolist()
            needed: Sequence[int] = range(len(unknown))
            if split == "train":
                needed = data.rows_of_batches(int(trainer.num_training_batches))
            missing[split] = [row for row in needed if unknown[row]]
        if any(missing.values()):
            self._compute(module, data, tables, missing)
            if rank() == 0:
                with replacing(path) as file:
                    file.write(save(tables))
        self.tables = {split: table.to(module.device) for split, table in tables.items()}

    def _compute(
        self,
        module: RLHFModule,
        data: RecordDataModule,
        tables: Mapping[str, Tensor],
        missing: Mapping[str, list[int]],
    ) -> None:
        """Fill the `missing` rows of the tables; each rank computes its share."""
        count = sum(map(len, missing.values()))
        rank_zero_info(f"Log-probabilities of {count:,} rows under the reference, once")
        policy = module.policy
        if isinstance(policy, AdaptedPolicy):
            reference: PolicyModel = frozen(AdaptedPolicy(policy.base, None))
        else:
            with module.sharing_models():
                reference = place_on_ranks(frozen(self.build()), frozen=True)
            move_models(module, [reference])
        with torch.no_grad(), module.trainer.strategy.precision_plugin.forward_context():
            for split, wanted in missing.items():
                if wanted:
                    rows: Any = data.rows(split)  # type: ignore[arg-type]
                    asked = [rows[row] for row in wanted]
                    collate = data.collator(training=True)
                    tables[split][wanted] = self._of_rows(reference, asked, collate, module.device)
        del reference
        release_freed_memory()
        if not all(tables[split][wanted].isfinite().all() for split, wanted in missing.items()):
            raise ValueError(
                "the reference gives non-finite log-probabilities to responses of the data: its "
                "weights are damaged or have diverged, start from another policy"
            )

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


def data_key(rows: Mapping[str, Rows], fingerprint: str, precision: str) -> str:
    """Return a SHA-256 of everything that the tables depend on.

    The ids of the rows stand for the data, the tokenizer with its template, and the longest row.

    Args:
        rows: rows of each split.
        fingerprint: fingerprint of the reference's source.
        precision: precision in which the reference computes.
    """
    digest = hashlib.sha256(f"{fingerprint} {precision}".encode())
    for split in SPLITS:
        for row in rows[split]:
            ids = (row.chosen_input_ids, row.rejected_input_ids)
            digest.update(f"{split} {row.prompt_length} {[len(side) for side in ids]}".encode())
            for side in ids:
                digest.update(side.tobytes())
    return digest.hexdigest()
