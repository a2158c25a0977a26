"""Prompts without responses from the question files of MT-bench, Vicuna and self-instruct."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlhf_lightning.arguments import Fraction, PathOrName, Seed, checked
from rlhf_lightning.data.errors import BadRecordError, Location, describe
from rlhf_lightning.data.records import PromptRecord, RecordKind, Split, check_split, text_key
from rlhf_lightning.data.splits import split_by_key

FIX = "give `turns` (MT-bench, Vicuna) or `instruction` and `instances` (self-instruct)"


class QuestionSource:
    """Questions of one or more files as conversations of one message, each once.

    A row of MT-bench or Vicuna has `turns`, of which the first is asked, and `category`; a row of
    self-instruct has `instruction`, `instances` whose first `input` follows it after an empty line,
    and `motivation_app`. Category and application are the domain.

    Args:
        path: a `.jsonl` file, or a folder: all its `.jsonl` files, by name.
        validation_fraction: share of the prompts held out.
        seed: seeds the split; not the run's, so that every stage holds out the same.

    Source: Zheng et al. 2023, "Judging LLM-as-a-judge with MT-bench and Chatbot Arena"; Wang et al.
    2023, "Self-instruct".
    """

    @checked
    def __init__(
        self, path: PathOrName, *, validation_fraction: Fraction = 0.05, seed: Seed = 1
    ) -> None:
        """Nothing is read yet."""
        self.path = Path(str(path)).expanduser()
        self.validation_fraction = validation_fraction
        self.seed = seed

    def files(self, split: Split) -> list[Path]:
        """Return the files that are read, for the record of a run."""
        return sorted(self.path.glob("*.jsonl")) if self.path.is_dir() else [self.path]

    def records(self, kind: RecordKind, split: Split) -> list[PromptRecord]:
        """Return the prompts of a split, in the order of the files.

        Raises:
            BadRecordError: for a row that is no question.
            ValueError: for another kind or split.
        """
        check_split(split)
        if kind != "prompts":
            raise ValueError(f"kind={kind!r}: the records are prompts")
        found = {text_key(record.prompt): record for record in reversed([*self._read()])}
        keys, records = [*found][::-1], [*found.values()][::-1]
        train, validation = split_by_key(
            records,
            keys,
            validation_fraction=self.validation_fraction,
            seed=self.seed,
            name=str(self.path),
        )
        return train if split == "train" else validation

    def _read(self) -> Iterator[PromptRecord]:
        for file in self.files("train"):
            for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
                row = json.loads(line)
                if not (text := _question(row).strip()):
                    found = f"the row holds {describe(row)}"
                    raise BadRecordError(Location(str(file), number), found, FIX)
                domain = str(row.get("category", row.get("motivation_app", "")))
                yield PromptRecord(({"role": "user", "content": text},), domain)


def _question(row: Mapping[str, Any]) -> str:
    if "turns" in row:
        turns = row["turns"]
        return str(turns[0]) if turns and isinstance(turns, list) else ""
    asked, instances = str(row.get("instruction", "")).strip(), row.get("instances")
    if not asked or not instances:
        return ""
    return f"{asked}\n\n{str(instances[0].get('input', '')).strip()}"
