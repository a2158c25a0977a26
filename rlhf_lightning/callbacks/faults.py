"""Batches that stopped a run with a non-finite value: `faults/iteration=000012/`."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any, cast

from lightning.pytorch import Callback, LightningModule, Trainer
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf_lightning.batches import PreferenceBatch, RolloutBatch, SFTBatch, TensorBatch
from rlhf_lightning.modules.base import RLHFModule
from rlhf_lightning.modules.non_finite import NonFiniteError
from rlhf_lightning.runs.atomic import write_text
from rlhf_lightning.runs.folder import RunFolder, to_json
from rlhf_lightning.text.decode import decoded, text_behind

logger = logging.getLogger(__name__)


class SaveFaultyBatch(Callback):
    """Save the batch that a run stopped at, each rank its own rows.

    `rank_0.safetensors` holds its tensors by field, `rank_0.jsonl` a line a row with the texts and
    the names of the fields that are not finite.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Save the batch of a `NonFiniteError`, and let the error say where it is."""
        if not isinstance(exception, NonFiniteError):
            return
        folder = self.folder.faults / f"iteration={exception.iteration:06d}"
        stem = folder / f"rank_{trainer.global_rank}"
        batch = exception.batch.to("cpu")
        rows = describe_rows(batch, cast(RLHFModule, pl_module).tokenizer)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tensors = {name: value.contiguous().clone() for name, value in _tensors(batch)}
            save_file(tensors, stem.with_suffix(".safetensors"))
            write_text(stem.with_suffix(".jsonl"), "".join(to_json(row) + "\n" for row in rows))
        except OSError as error:  # what stopped the run must not be hidden by a full disk
            logger.warning("the batch that stopped the run could not be saved: %s", error)
        else:
            exception.saved = str(folder)


def describe_rows(
    batch: TensorBatch, tokenizer: PreTrainedTokenizerBase | None
) -> list[dict[str, Any]]:
    """Return each row as plain values: texts, numbers, and `not_finite`, the fields that are not.

    Special tokens are kept in the texts; without a tokenizer there are the ids.
    """
    rows: list[dict[str, Any]] = [{"row": i} for i in range(len(batch))]
    before: list[list[int]] = []
    for name, ids, mask in _texts(batch):
        own = [ids[i][mask[i]].tolist() for i in range(len(rows))]
        for i, row in enumerate(rows):
            if tokenizer is None:
                row[name] = own[i]
            elif name == "response":
                row[name] = text_behind(before[i], own[i], tokenizer)
            else:
                row[name] = decoded(own[i], tokenizer)
        before = own
    columns: dict[str, Any] = {k: v for k, v in vars(batch).items() if isinstance(v, tuple)}
    columns |= {name: value.tolist() for name, value in _tensors(batch) if value.dim() == 1}
    for i, row in enumerate(rows):
        row |= {name: value[i] for name, value in columns.items()}
        if odd := [n for n, value in _tensors(batch) if not bool(value[i].isfinite().all())]:
            row["not_finite"] = odd
    return rows


def _tensors(batch: TensorBatch) -> Iterator[tuple[str, Tensor]]:
    for name, value in vars(batch).items():
        if isinstance(value, Tensor):
            yield name, value
        elif isinstance(value, Mapping):
            yield from ((f"{name}.{k}", v) for k, v in value.items() if isinstance(v, Tensor))


def _texts(batch: TensorBatch) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield name, ids and mask of each text of a row."""
    if isinstance(batch, RolloutBatch):
        yield "prompt", batch.query_tensors, batch.attention_mask[:, : batch.prompt_length]
        yield "response", batch.response_tensors, batch.response_mask
    elif isinstance(batch, PreferenceBatch):
        yield "chosen", batch.chosen_input_ids, batch.chosen_attention_mask
        yield "rejected", batch.rejected_input_ids, batch.rejected_attention_mask
    elif isinstance(batch, SFTBatch):
        yield "text", batch.input_ids, batch.attention_mask
