"""The LightningDataModule that the three stages share.

A stage is one Lightning epoch: `len(train_dataloader()) == num_iterations`, one batch is one
iteration, and several passes over the data follow each other inside the sampler. A resumed stage
yields exactly the batches that the interrupted one did not train on.
"""

from __future__ import annotations

import hashlib
import logging
import math
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypedDict, Unpack, cast, get_args

import numpy as np
import torch
from lightning import LightningDataModule
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedTokenizerBase

from rlhf_lightning.arguments import (
    Count,
    CountOrZero,
    Default,
    Epochs,
    Length,
    Seed,
    Size,
    Workers,
    checked,
)
from rlhf_lightning.data.encode import (
    Encoded,
    EncodingReport,
    OverLong,
    RecordEncoder,
    give_same_columns,
)
from rlhf_lightning.data.records import KINDS, LossOn, Record, RecordKind, Split
from rlhf_lightning.data.sampler import (
    SequentialBatchSampler,
    StreamBatchSampler,
    stream_generator,
    validation_part,
)
from rlhf_lightning.data.sources.base import RecordSource
from rlhf_lightning.data.sources.given import Rows, as_source
from rlhf_lightning.data.splits import warn_of_shared_turns
from rlhf_lightning.data.summary import DataSummary, render_examples, summarize, warn_of_rows
from rlhf_lightning.distributed.collectives import check_same_on_all_ranks, world_size
from rlhf_lightning.models.loading import load_config, loading_options
from rlhf_lightning.runs.manifest import Source

logger = logging.getLogger(__name__)
VALIDATION_BATCH_FACTOR = 2


class StreamOptions(TypedDict, total=False):
    """Options of every DataModule, see `RecordDataModule`."""

    num_iterations: Count | None
    over_long: Annotated[OverLong, Default("drop")]
    seed: Seed | None
    show_examples: Annotated[CountOrZero, Default(0)]
    max_validation_rows: Count | None
    validation_batch_size: Size | None
    num_workers: Annotated[Workers, Default(0)]


class RowOptions(StreamOptions, total=False):
    """Options of the DataModules whose rows are trained on, see `RecordDataModule`."""

    kind: RecordKind | None
    num_epochs: Epochs | None
    max_length: Length | None
    group_by_length: Annotated[bool, Default(True)]


class _Rows(Dataset[Any]):
    """Encoded rows; a (row, row id) index gives a (row, row id) pair."""

    def __init__(self, rows: Sequence[Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int | tuple[int, int]) -> Any:
        return (self.rows[index[0]], index[1]) if isinstance(index, tuple) else self.rows[index]


class RecordDataModule(LightningDataModule):
    """Encodes the records of a source once and deals them out in batches; the stages' base.

    Args:
        source: where the records come from: a file, the hub name of a dataset, rows (a list of
            mappings or a `datasets.Dataset`), or a source.
        tokenizer: makes ids of them; its pad id (or else its EOS id) fills the padding.
        batch_size: rows of a global batch; the number of ranks must divide it.
        kind: kind of the records, one of `kinds`; None takes the first.
        num_iterations: batches of the stage.
        num_epochs: passes over the training rows, may be fractional; without it and
            `num_iterations` the stage has as many batches as the Trainer's `limit_train_batches`,
            `max_iterations` of `trainer_arguments`.
        max_length: most tokens of a row, EOS included; None for 1,024, or less where the model that
            is trained has a shorter context.
        over_long: `"drop"` longer rows, or `"truncate_left"`: cut their prompt from the left.
        loss_on: learnt part of a demonstration: the `"last"` response, or `"all"` turns of the
            assistant but those with `weight: 0`.
        seed: seeds the order of the rows; None takes that of the module that is trained.
        group_by_length: put rows of like length into a batch.
        show_examples: how many decoded examples to show before training.
        max_validation_rows: a random part of the held-out rows; None for all.
        validation_batch_size: rows of a rank's validation batch; None for twice its share of
            `batch_size`.
        num_workers: processes that collate; 0 is right unless rows are very long.

    Raises:
        ValueError: if a number is out of range, or both `num_iterations` and `num_epochs` are
            given.
        TypeError: if `source` or `tokenizer` is something else.
    """

    kinds: ClassVar[tuple[RecordKind, ...]] = ()
    _usual_length: ClassVar[int] = 1024
    _leaves_room: ClassVar[bool] = False  # for a response behind a row
    _with_row_ids = False
    _may_repeat = False  # rows that are asked, not trained on, whose prompts were warned of
    _batch: ClassVar[Any]  # pad id -> collator
    _sampler: StreamBatchSampler | None = None

    @checked(but=("source",))
    def __init__(
        self,
        source: RecordSource | Rows | str | Path,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        batch_size: Size,
        loss_on: LossOn = "last",
        **options: Unpack[RowOptions],
    ) -> None:
        """Check the numbers; nothing is read yet."""
        super().__init__()
        num_iterations, num_epochs = options["num_iterations"], options["num_epochs"]
        if num_iterations is not None and num_epochs is not None:
            both = f"num_iterations={num_iterations} and num_epochs={num_epochs}"
            raise ValueError(f"{both}: give one")
        self.kind = options["kind"] or self.kinds[0]
        if self.kind not in self.kinds:
            raise ValueError(f"kind={self.kind!r}: use {' or '.join(map(repr, self.kinds))}")
        if loss_on == "all" and self.kind != "demonstrations":
            raise ValueError(f"loss_on=all is of demonstrations alone: use last with {self.kind}")
        self.source = as_source(source)
        self.tokenizer = cast(PreTrainedTokenizerBase, tokenizer)  # None where settings are checked
        self.batch_size = batch_size
        self._num_iterations = num_iterations
        self._num_epochs = num_epochs
        self.max_length = options["max_length"] or self._usual_length
        self._fits = options["max_length"] is None
        self.over_long = options["over_long"]
        self.loss_on = loss_on
        self._seed = options["seed"]
        self.group_by_length = options["group_by_length"]
        self.show_examples = options["show_examples"]
        self.max_validation_rows = options["max_validation_rows"]
        self.validation_batch_size = options["validation_batch_size"]
        self.num_workers = options["num_workers"]
        self.summaries: dict[Split, DataSummary] = {}
        self._rows: dict[Split, list[Any]] = {}
        self._restored: dict[str, Any] = {}
        self._digests: dict[str, str] = {}

    @property
    def num_iterations(self) -> int:
        """Batches of the stage: as given, `ceil(num_epochs * rows / batch_size)`, or the Trainer's.

        Raises:
            ValueError: if nothing says how many.
        """
        if self._num_iterations is not None:
            return self._num_iterations
        if self._num_epochs is not None:
            return math.ceil(self._num_epochs * len(self.rows("train")) / self.batch_size)
        limit = None if self.trainer is None else self.trainer.limit_train_batches
        if not isinstance(limit, int):
            fix = "give the data num_iterations or num_epochs, or trainer_arguments max_iterations"
            raise ValueError(f"nothing says how long to train: {fix}")
        return limit

    @property
    def seed(self) -> int:
        """The seed: as given, else of the module that is trained, else 1."""
        if self._seed is None:
            module = None if self.trainer is None else self.trainer.lightning_module
            return int(module.hparams.get("seed", 1)) if module is not None else 1
        return self._seed

    @property
    def summary(self) -> DataSummary:
        """The summary of the training rows; `summaries` has both splits."""
        self.setup()
        return self.summaries["train"]

    @property
    def contents(self) -> str:
        """The kind of the rows, and what they are of rows of another kind."""
        taken = ", ".join(self.summary.taken)
        return f"{self.kind} ({taken})" if taken else self.kind

    @property
    def consumed(self) -> int:
        """Number of batches trained on: Lightning's count, from which a resumed run continues."""
        trainer = self.trainer
        if trainer is None or trainer.state.fn != TrainerFn.FITTING:
            return self._restored.get("consumed", 0)
        # `processed` counts a batch as soon as its training step is done, in whichever hook the
        # checkpoint is written; a resumed Lightning continues from the same count.
        progress = cast(Any, trainer.fit_loop.epoch_loop.batch_progress.current)
        return int(progress.processed)

    def rows(self, split: Split) -> Sequence[Encoded]:
        """Return the encoded rows of a split."""
        if not self._rows:  # else a subclass may ask in its own `setup`
            self.setup()
        return self._rows[split]

    def prepare_data(self) -> None:
        """Read the source once on one process, so that a download happens only once.

        Rows that are encoded already need no source: Lightning asks before every loop.
        """
        if not self._rows:
            self.source.records(self.kind, "train")

    def setup(self, stage: str | None = None) -> None:
        """Encode both splits, once, and show what is in them.

        Raises:
            ValueError: if no training row is left, or fewer than a batch, or if the same rows are
                held out.
            TypeError: if the source gives something else than records of the kind.
        """
        if self._rows:
            return
        if not isinstance(self.tokenizer, PreTrainedTokenizerBase):
            fix = "expected one of transformers: give module.tokenizer"
            raise TypeError(f"tokenizer={self.tokenizer!r}, {fix}")
        if self._fits:
            self.max_length = self._length_in_context()
        records = {split: self._records(split) for split in get_args(Split)}
        if records["train"] and records["train"] == records["validation"]:
            told = f"{type(self.source).__name__}.records gives both splits the same {self.kind}"
            raise ValueError(f"{told}: give each rows of its own, [] for no validation")
        options: dict[str, Any] = {"max_length": self.max_length, "over_long": self.over_long}
        options["loss_on"] = self.loss_on
        rows: dict[Split, list[Any]] = {}
        reports: dict[Split, EncodingReport] = {}
        for split in records:
            encoder = RecordEncoder(self.tokenizer, **options)
            rows[split], reports[split] = encoder.encode_all(records[split]), encoder.report
        give_same_columns(*rows.values())
        reports["train"].skipped += getattr(self.source, "skipped_records", ())
        for split, report in reports.items():
            if hasattr(self.source, "left_out"):
                report.dropped.update(self.source.left_out(self.kind, split))
            name = f"{split} {self.kind}"
            self.summaries[split] = summarize(rows[split], name=name, kind=self.kind, report=report)
        num_rows = len(rows["train"])
        if not num_rows:
            dropped = f"{dict(self.summaries['train'].dropped)} at max_length={self.max_length}"
            fix = "Raise max_length, or set over_long='truncate_left'"
            raise ValueError(f"no training row is left of the {self.kind}: {dropped}. {fix}")
        # Else a batch would hold some rows several times.
        if self.batch_size > num_rows and not self._may_repeat:
            size = f"batch_size={self.batch_size} is more than the {num_rows} training {self.kind}"
            raise ValueError(f"{size}: use at most {num_rows}, or give more records")
        self._digests = {"validation_rows": rows_digest(rows["validation"])}
        part = validation_part(rows["validation"], self.max_validation_rows, self.seed)
        self._rows = rows | {"validation": part}
        rank_zero_info(self.render_summary())
        if not self._may_repeat:
            warn_of_rows(records["train"], self.tokenizer, self.summaries["train"])
        if self.loss_on == "all":
            warn_of_shared_turns(*rows.values())

    def _records(self, split: Split) -> list[Record]:
        records = self.source.records(self.kind, split)
        wrong = next((n for n, r in enumerate(records) if KINDS.get(type(r)) != self.kind), None)
        if wrong is not None:
            place = f"{type(self.source).__name__}.records({self.kind!r}, {split!r})[{wrong}]"
            found = f"{type(records[wrong]).__name__}, expected a record of {self.kind}"
            raise TypeError(f"{place} is {found}: give the DataModule the rows, a list of dict")
        return records

    def token_ids(self) -> frozenset[int]:
        """Return every id that a row of either split holds."""
        self.setup()
        rows = (*self._rows["train"], *self._rows["validation"])
        values = (value for row in rows for value in vars(row).values())
        ids = [v for v in values if isinstance(v, np.ndarray) and v.dtype == np.int32 and v.size]
        held = np.zeros(max((int(v.max()) for v in ids), default=-1) + 1, dtype=bool)
        for each in ids:
            held[each] = True
        return frozenset(held.nonzero()[0].tolist())

    def render_summary(self) -> str:
        """Return the tables of both splits, and the first examples if they are asked for."""
        self.setup()
        parts = [one.render() for one in self.summaries.values() if one.num_rows or one.dropped]
        if self.show_examples:
            parts.append(render_examples(self._rows["train"], self.tokenizer, self.show_examples))
        return "\n".join(parts)

    def train_dataloader(self) -> DataLoader[Any]:
        """Return the loader of the batches that are still to be trained on."""
        rows = self.rows("train")
        self._check_restored(len(rows))
        if world_size() > 1:
            identity = self._identity(len(rows))
            digests = (identity[key][:12] for key in ("training_rows", "validation_rows"))
            check_same_on_all_ranks("data", " ".join(digests))
        limit, own = getattr(self.trainer, "limit_train_batches", None), self.num_iterations
        if type(limit) is int and limit > own and not self._rank:
            told = f"max_iterations={limit}, and the data have {own}: {own} are trained"
            logger.warning(f"{told}, give num_iterations={limit} for more")
        num_spare_batches, whole_spares = self._spare_batches()
        self._sampler = StreamBatchSampler(
            len(rows),
            batch_size=self.batch_size,
            num_iterations=own,
            seed=self.seed,
            lengths=[len(row) for row in rows] if self.group_by_length else None,
            groups=self._groups(rows),
            rank=self._rank,
            world_size=self._world_size,
            with_row_ids=self._with_row_ids,
            num_spare_batches=num_spare_batches,
            whole_spares=whole_spares,
        )
        self._sampler.consumed = self._restored.get("consumed", 0)
        return self._loader(_Rows(rows), self._sampler, training=True)

    def rows_of_batches(self, num_batches: int) -> list[int]:
        """Return the training rows that the first `num_batches` global batches of the stage hold.

        There must be a loader of the training rows.
        """
        assert self._sampler is not None
        batches = map(self._sampler.batch, range(num_batches))
        return sorted({row for batch in batches for row in batch})

    def collator(self, *, training: bool) -> Callable[[Any], Any]:
        """Return the function that makes a batch of encoded rows."""
        del training
        return cast(Callable[[Any], Any], self._batch(self._pad_token_id))

    @property
    def _pad_token_id(self) -> int:
        pad = self.tokenizer.pad_token_id
        return cast(int, self.tokenizer.eos_token_id if pad is None else pad)

    def val_dataloader(self) -> DataLoader[Any] | list[Any]:
        """Return the loader of the held-out rows, each once; an empty list if there are none."""
        rows = self.rows("validation")
        if not rows:
            return []
        usual = VALIDATION_BATCH_FACTOR * max(self.batch_size // self._world_size, 1)
        share = self.validation_batch_size or usual
        sampler = SequentialBatchSampler(
            len(rows),
            batch_size=share,
            lengths=[len(row) for row in rows] if self.group_by_length else None,
            rank=self._rank,
            world_size=self._world_size,
        )
        numbered = [(row, number) for number, row in enumerate(rows)]
        return self._loader(numbered if self._with_row_ids else rows, sampler, training=False)

    def state_dict(self) -> dict[str, Any]:
        """Return where the stream stands, and what it is a stream of."""
        return {"consumed": self.consumed, **self._identity(len(self.rows("train")))}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue behind the batches that the checkpoint was trained on."""
        self._restored = dict(state_dict)
        if self._sampler is not None:  # FSDP2 asks for the loader before it reads the checkpoint
            self._check_restored(self._sampler.num_rows)
            self._sampler.consumed = self._restored["consumed"]
        # Lightning looks for a loader with a state; here the sampler starts at the right batch.
        warnings.filterwarnings("ignore", message="You're resuming from a checkpoint that ended")

    def teardown(self, stage: str) -> None:
        """Forget the resume after a fit, so that another fit starts at the first batch."""
        if stage == "fit":
            self._restored = {}

    def _spare_batches(self) -> tuple[int, bool]:
        """Return how many of the following batches are given, and if whole to each rank."""
        return 0, False

    def _groups(self, rows: Sequence[Any]) -> list[int] | None:
        """Return the group of each training row where rows of a group stay together."""
        return None

    def _loader(self, rows: Any, sampler: Any, *, training: bool) -> DataLoader[Any]:
        return DataLoader(
            rows,
            batch_sampler=sampler,
            collate_fn=self.collator(training=training),
            num_workers=self.num_workers,
            # Without this generator each iterator draws from the global one.
            generator=stream_generator(self.seed, "loader", 0),
            pin_memory=torch.cuda.is_available(),
        )

    def _length_in_context(self) -> int:
        """Return the usual length of a row, or what the context of the model has room for."""
        module: Any = getattr(self.trainer, "lightning_module", None)
        source: Source | None = getattr(module, "source", None)
        if source is None:
            return self.max_length
        trusts = bool(module.hparams.get("trust_remote_code"))
        options = loading_options(source.name, revision=source.revision, trust_remote_code=trusts)
        config = load_config(source.name, options).get_text_config()
        limit = getattr(config, "max_position_embeddings", None) or self.max_length
        room = limit - (module.sampling.max_new_tokens if self._leaves_room else 0)
        return min(self.max_length, room) if room > 0 else self.max_length

    @property
    def _rank(self) -> int:
        return self.trainer.global_rank if self.trainer is not None else 0

    @property
    def _world_size(self) -> int:
        return self.trainer.world_size if self.trainer is not None else 1

    def _identity(self, num_rows: int) -> dict[str, Any]:
        """Return what a resumed run must agree in with its checkpoint."""
        if "training_rows" not in self._digests:
            self._digests["training_rows"] = rows_digest(self.rows("train"))
        return {
            "num_rows": num_rows,
            "batch_size": self.batch_size,
            "seed": self.seed,
            "group_by_length": self.group_by_length,
            **self._digests,
        }

    def _check_restored(self, num_rows: int) -> None:
        for name, value in self._identity(num_rows).items():
            saved = self._restored.get(name, value)  # a run that starts has none
            if saved != value:
                found = f"the checkpoint was made with data {name}={saved}, this run has {value}"
                raise ValueError(f"{found}: give the same data, or start again with resume=never")


def rows_digest(rows: Iterable[Encoded]) -> str:
    """Return a SHA-256 of what encoded rows hold, in their order: tokens, columns and the rest.

    It covers all that decides a batch: files, the weights of a mix, lengths, the seed of a split,
    and the columns that a custom source gives to a reward function.
    """
    digest = hashlib.sha256()
    for row in rows:
        for value in vars(row).values():
            if isinstance(value, np.ndarray):
                digest.update(f"{value.shape}".encode() + value.tobytes())
        parts = (row.domain, getattr(row, "margin", 0.0), getattr(row, "prompt_length", None))
        digest.update(f"{parts}".encode())
        if (label := getattr(row, "label", None)) is not None:
            digest.update(f"label {label}".encode())
        columns = repr(sorted(getattr(row, "columns", {}).items()))
        digest.update(re.sub(r" at 0x[0-9a-fA-F]+>", ">", columns).encode())  # places in memory
    return digest.hexdigest()
