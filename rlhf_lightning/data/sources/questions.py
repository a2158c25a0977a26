"""Prompts without responses from the question files of MT-bench, Vicuna and self-instruct."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from rlhf_lightning.arguments import Fraction, PathOrName, Seed, checked
from rlhf_lightning.data.errors import BadRecordError, Location, describe
from rlhf_lightning.data.files import LocatedRow, Row
from rlhf_lightning.data.formats import ParsedRow
from rlhf_lightning.data.records import PromptRecord, Split
from rlhf_lightning.data.sources.base import FileSource

FIX = "give `turns` (MT-bench, Vicuna) or `instruction` and `instances` (self-instruct)"


class QuestionSource(FileSource):
    """Questions of one or more files as conversations of one message, each once.

    A row of MT-bench or Vicuna has `turns`, of which the first is asked, and `category`; a row of
    self-instruct has `instruction`, `instances` whose first `input` follows it after an empty line,
    and `motivation_app`. Category and application are the domain.

    Args:
        path: a file that `read_rows` reads, or a folder: all its `.jsonl` files, by name.
        validation_fraction: share of the prompts held out.
        seed: seeds the split; not the run's, so that every stage holds out the same.

    Raises:
        ValueError: if no path was given.

    Source: Zheng et al. 2023, "Judging LLM-as-a-judge with MT-bench and Chatbot Arena"; Wang et al.
    2023, "Self-instruct".
    """

    @checked
    def __init__(
        self, path: PathOrName | None, *, validation_fraction: Fraction = 0.05, seed: Seed = 1
    ) -> None:
        """Check the arguments; nothing is read yet."""
        super().__init__(path, validation_fraction=validation_fraction, seed=seed)

    def files(self, split: Split) -> list[Path]:
        """Return the files of a split; all are split by prompt."""
        path = self.folder_or_file
        if split == "validation":
            return []
        return sorted(path.glob("*.jsonl")) if path.is_dir() else [path]

    def _rows(self, split: Split) -> Iterable[LocatedRow] | None:
        if split == "train" and not self.files(split):
            where = Location(self.label)
            raise BadRecordError(where, "the folder holds no .jsonl file", "give one that does")
        return super()._rows(split)

    def _parse(self, rows: Iterable[LocatedRow] | None) -> list[ParsedRow]:
        found: dict[str, ParsedRow] = {}
        for row in super()._parse(rows):
            found.setdefault(row.split_key, row)
        return list(found.values())

    def _parser(self) -> Callable[[Row, Location], ParsedRow]:
        return _parse_question


def _parse_question(row: Row, where: Location) -> ParsedRow:
    text = None
    if "turns" in row:
        text = _first(row["turns"])
    elif isinstance(asked := row.get("instruction"), str) and asked.strip():
        instance = _first(row.get("instances"))
        given = instance.get("input", "") if isinstance(instance, dict) else None
        text = f"{asked.strip()}\n\n{given.strip()}" if isinstance(given, str) else None
    if not isinstance(text, str) or not text.strip():
        raise BadRecordError(where, f"the row holds {describe(dict(row))}", FIX)
    domain = str(row.get("category", row.get("motivation_app", "")))
    return ParsedRow(PromptRecord(({"role": "user", "content": text.strip()},), domain), where, {})


def _first(values: object) -> object:
    return values[0] if isinstance(values, list) and values else None
