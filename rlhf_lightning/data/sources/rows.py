"""Records of rows: parsed, split by prompt, and converted to the kind that is asked for."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence

from rlhf_lightning.data.errors import BadRecordError, OnBadRecord, SkippedRecords
from rlhf_lightning.data.files import LocatedRow, RepeatedKeys
from rlhf_lightning.data.formats import ParsedRow, check_columns, parse_rows, to_kind
from rlhf_lightning.data.records import Record, RecordKind, Split, kind_of, prompt_key
from rlhf_lightning.data.splits import split_by_key

logger = logging.getLogger(__name__)


class RowSource:
    """Parses rows once, splits them by prompt where there is no validation set, and converts.

    Args:
        name: of the file or data set.
        columns: our name -> their name; null hides a column.
        validation_fraction: share of prompts held out where there is no validation set.
        seed: of the split by prompt.
        on_bad_record: `"raise"`, or `"skip"` to leave bad records out, counted and named.
        rendered: of rows that do not say it themselves.
    """

    def __init__(
        self,
        name: str,
        *,
        columns: Mapping[str, str | None] | None,
        validation_fraction: float,
        seed: int,
        on_bad_record: OnBadRecord,
        rendered: bool,
    ) -> None:
        self.name = name
        self.columns = check_columns(columns)
        self.validation_fraction = validation_fraction
        self.seed = seed
        self.rendered = rendered
        self.num_repeated_keys = 0  # rows of JSON with a key twice, of what was read so far
        self._skipped = SkippedRecords(on_bad_record)
        self._splits: dict[Split, list[ParsedRow]] | None = None

    @property
    def skipped_records(self) -> tuple[str, ...]:
        """Messages about the bad records that were left out (of what was read so far)."""
        return tuple(self._skipped.messages)

    def records(self, kind: RecordKind, split: Split) -> list[Record]:
        """Return all records of `split` as `kind`, in the order of the source.

        Prompts taken from demonstrations or preferences are made unique: a prompt with ten pairs
        is one prompt to answer. A set of prompts is kept as it is.

        Raises:
            BadRecordError: for a bad record unless it is skipped, or if the records cannot be
                turned into `kind`.
            ValueError: if `split` is unknown.
        """
        if split not in ("train", "validation"):
            raise ValueError(f"split={split!r} is unknown: use 'train' or 'validation'")
        if self._splits is None:
            self._splits = self._load()
        rows = self._splits[split]
        if kind == "prompts" and rows and kind_of(rows[0].record) != "prompts":
            rows = list({prompt_key(row.record): row for row in reversed(rows)}.values())[::-1]
        return list(self._converted(rows, kind))

    def _converted(self, rows: Sequence[ParsedRow], kind: RecordKind) -> Iterator[Record]:
        for row in rows:
            try:
                yield to_kind(row, kind)
            except BadRecordError as error:
                # A set of the wrong kind is no bad record, and skipping would hide all of it.
                if kind != "prompts" or kind_of(row.record) == "texts":
                    raise
                if str(error) not in self._skipped.messages:
                    self._skipped.add(error)

    def _load(self) -> dict[Split, list[ParsedRow]]:
        train = self._parse(self._rows("train"))
        validation_rows = self._rows("validation")
        if validation_rows is not None:
            validation = self._parse(validation_rows)
            self._warn_of_shared_prompts(train, validation)
            return {"train": train, "validation": validation}
        train, validation = split_by_key(
            train,
            lambda row: prompt_key(row.record),
            validation_fraction=self.validation_fraction,
            seed=self.seed,
            name=self.name,
        )
        return {"train": train, "validation": validation}

    def _warn_of_shared_prompts(self, train: list[ParsedRow], validation: list[ParsedRow]) -> None:
        held_out = {prompt_key(row.record) for row in validation}
        shared = held_out & {prompt_key(row.record) for row in train}
        if shared:
            logger.warning(
                "%s: %d of %d validation prompts are trained on too, so validation says nothing "
                "about new prompts there, e.g. %r",
                self.name,
                len(shared),
                len(held_out),
                min(shared)[:60],
            )

    def _parse(self, rows: Iterable[LocatedRow] | None) -> list[ParsedRow]:
        return parse_rows(
            self._counted(rows or []),
            columns=self.columns,
            skipped=self._skipped,
            rendered=self.rendered,
        )

    def _counted(self, rows: Iterable[LocatedRow]) -> Iterator[LocatedRow]:
        for where, row in rows:
            self.num_repeated_keys += isinstance(row, RepeatedKeys)
            yield where, row

    def _rows(self, split: Split) -> Iterable[LocatedRow] | None:
        raise NotImplementedError
