"""Prompts without answers from the question files of MT-bench, Vicuna and self-instruct."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from rlhf_lightning.data.errors import BadRecordError, Location, describe
from rlhf_lightning.data.files import read_rows
from rlhf_lightning.data.records import PromptRecord, Record, RecordKind, Split, text_key
from rlhf_lightning.data.splits import split_by_key

FIX = "give `turns` (MT-bench, Vicuna) or `instruction` and `instances` (self-instruct)"


class QuestionSource:
    """Questions of one or more files as conversations of one message.

    A row of MT-bench or Vicuna has `turns`, of which the first is asked, and `category`; a row of
    self-instruct has `instruction`, `instances` whose first `input` follows it after an empty line,
    and `motivation_app`. Category and application are the domain. A question that stands twice is
    one prompt.

    Args:
        path: a file that `read_rows` reads, or a folder: all its `.jsonl` files, by name.
        validation_fraction: share of the prompts held out.
        seed: of the split; not the run's, so that every stage holds out the same.

    Raises:
        ValueError: if no path was given.

    Source: Zheng et al. 2023, "Judging LLM-as-a-judge with MT-bench and Chatbot Arena"; Wang et al.
    2023, "Self-instruct".
    """

    def __init__(
        self, path: str | Path | None, *, validation_fraction: float = 0.05, seed: int = 1
    ) -> None:
        """Check the arguments; nothing is read yet."""
        if path is None:
            raise ValueError("path=None: no path was given. Give dataset.path=FILE or a folder")
        self.path = Path(path).expanduser()
        self.validation_fraction = validation_fraction
        self.seed = seed

    def records(self, kind: RecordKind, split: Split) -> list[Record]:
        """Return each prompt once, in the order of the files.

        Raises:
            BadRecordError: for a row that is no question.
            ValueError: for another kind or split.
        """
        if kind != "prompts":
            raise ValueError(f"kind={kind!r} is not in this set: it holds prompts alone")
        if split not in ("train", "validation"):
            raise ValueError(f"split={split!r} is unknown: use 'train' or 'validation'")
        return list(self._parts[0 if split == "train" else 1])

    @cached_property
    def _parts(self) -> tuple[list[PromptRecord], list[PromptRecord]]:
        found: dict[str, PromptRecord] = {}
        for record in self._read():
            found.setdefault(text_key(record.prompt), record)
        return split_by_key(
            list(found.values()),
            lambda record: text_key(record.prompt),
            validation_fraction=self.validation_fraction,
            seed=self.seed,
            name=str(self.path),
        )

    def _read(self) -> Iterator[PromptRecord]:
        files = sorted(self.path.glob("*.jsonl")) if self.path.is_dir() else [self.path]
        if not files:
            raise BadRecordError(
                Location(str(self.path)), "the folder holds no .jsonl file", "give one that does"
            )
        for file in files:
            for where, row in read_rows(file):
                if isinstance(row, BadRecordError):
                    raise row
                text = _turn(row) if "turns" in row else _instruction(row)
                if text is None:
                    raise BadRecordError(where, f"the row holds {describe(dict(row))}", FIX)
                domain = row.get("category", row.get("motivation_app", ""))
                yield PromptRecord(({"role": "user", "content": text},), str(domain))


def _turn(row: Any) -> str | None:
    turns = row["turns"]
    first = turns[0] if isinstance(turns, list) and turns else None
    return first.strip() or None if isinstance(first, str) else None


def _instruction(row: Any) -> str | None:
    asked, instances = row.get("instruction"), row.get("instances")
    first = instances[0] if isinstance(instances, list) and instances else None
    given = first.get("input", "") if isinstance(first, dict) else None
    if not isinstance(asked, str) or not asked.strip() or not isinstance(given, str):
        return None
    return f"{asked.strip()}\n\n{given.strip()}".strip()
