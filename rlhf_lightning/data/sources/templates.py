"""Demonstrations and prompts that are put together from the fields of a file's rows."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from string import Formatter
from typing import Any, Literal

from rlhf_lightning.data.errors import BadRecordError, Location, SkippedRecords, closest, describe
from rlhf_lightning.data.files import LocatedRow, RepeatedKeys, read_rows
from rlhf_lightning.data.records import (
    DemonstrationRecord,
    PromptRecord,
    Record,
    RecordKind,
    Split,
    Text,
    text_key,
)
from rlhf_lightning.data.splits import split_by_key

REFERENCE = "completion"
TOO_LONG = "completion longer than max_completion_chars"
SEEN = "held-out completion that training shows too"


@dataclass(frozen=True)
class _Row:
    """A demonstration, what it is split by, and the row's other columns as text."""

    prompt: Text
    completion: Text
    reference: str
    domain: str
    group: str
    columns: Mapping[str, str]


@dataclass
class _Part:
    """The rows of a split, and how many were left out for which reason."""

    rows: list[_Row]
    left_out: Counter[str] = field(default_factory=Counter)


class TemplateSource:
    """Prompts and completions made of a file's fields, plain or as conversations.

    `prompt="Platform: {platform}. Task: {task}"` puts the fields `platform` and `task` of each row
    into a text. Every prompt carries the row's fields as columns for reward functions, and the
    finished completion as the column "completion".

    Args:
        path: a file that `read_rows` reads, e.g. `.jsonl.gz`.
        prompt: template of the user's message.
        completion: template of the answer.
        system: template of a system message; None leaves it to the chat template.
        chat: conversations for a tokenizer with a chat template; False makes plain text, whose
            completion starts with a space.
        split_by: field whose rows all land on one side, e.g. a page of which there are several
            versions; None splits by prompt.
        validation_fraction: share of the groups held out.
        seed: of the split; not the run's, so that every stage holds out the same.
        domain: field that metrics are split by.
        remove: regular expression; what it matches is taken out of the completion.
        max_completion_chars: rows with longer completions are left out, and counted.
        unseen_completions: leave out held-out rows whose completion training shows, and count them.
        on_bad_record: `"raise"`, or `"skip"` to leave bad rows out, counted and named.

    Raises:
        ValueError: if the path is missing, a template has no field or is malformed, `remove` is no
            regular expression, or a number is out of range.
    """

    def __init__(
        self,
        path: str | Path | None,
        *,
        prompt: str,
        completion: str = "{completion}",
        system: str | None = None,
        chat: bool = True,
        split_by: str | None = None,
        validation_fraction: float = 0.05,
        seed: int = 0,
        domain: str | None = None,
        remove: str | None = None,
        max_completion_chars: int | None = None,
        unseen_completions: bool = False,
        on_bad_record: Literal["raise", "skip"] = "raise",
    ) -> None:
        """Check the arguments; nothing is read yet."""
        if path is None:
            raise ValueError("path=None: no path was given. Give dataset.path=FILE")
        if system is not None and not chat:
            raise ValueError("system is given, but chat=False has no system message: leave it out")
        if max_completion_chars is not None and max_completion_chars < 1:
            raise ValueError(f"max_completion_chars={max_completion_chars} must be 1 or more")
        self.path = Path(path).expanduser()
        templates = {"prompt": prompt, "completion": completion}
        self.templates = templates if system is None else {"system": system, **templates}
        self.fields = {name: fields_of(text, name) for name, text in self.templates.items()}
        self.chat = chat
        self.split_by = split_by
        self.validation_fraction = validation_fraction
        self.seed = seed
        self.domain = domain
        self.remove = None if remove is None else _compiled(remove)
        self.max_completion_chars = max_completion_chars
        self.unseen_completions = unseen_completions
        self.num_repeated_keys = 0  # rows of JSON with a key twice, of what was read so far
        self._skipped = SkippedRecords(on_bad_record)
        self._splits: dict[Split, _Part] | None = None

    @property
    def skipped_records(self) -> tuple[str, ...]:
        """Messages about the bad rows that were left out (of what was read so far)."""
        return tuple(self._skipped.messages)

    def records(self, kind: RecordKind, split: Split) -> list[Record]:
        """Return demonstrations, or each prompt once, in the order of the file.

        Raises:
            BadRecordError: for a bad row unless it is skipped.
            ValueError: for another kind or split.
        """
        rows = self._part(split).rows
        if kind == "demonstrations":
            return [DemonstrationRecord(r.prompt, r.completion, r.domain) for r in rows]
        if kind == "prompts":
            first = {text_key(row.prompt): row for row in reversed(rows)}
            return [PromptRecord(r.prompt, r.domain, r.columns) for r in [*first.values()][::-1]]
        raise ValueError(f"kind={kind!r} is not in this set: use 'demonstrations' or 'prompts'")

    def left_out(self, kind: RecordKind, split: Split) -> Mapping[str, int]:
        """Return how many good rows were left out, by reason."""
        return dict(self._part(split).left_out)

    def _part(self, split: Split) -> _Part:
        if split not in ("train", "validation"):
            raise ValueError(f"split={split!r} is unknown: use 'train' or 'validation'")
        if self._splits is None:
            self._splits = self._load()
        return self._splits[split]

    def _load(self) -> dict[Split, _Part]:
        rows = self._parse(read_rows(self.path))
        sides = split_by_key(
            rows,
            lambda row: row.group,
            validation_fraction=self.validation_fraction,
            seed=self.seed,
            name=str(self.path),
        )
        parts = [self._short_enough(side) for side in sides]
        train, validation = parts
        if self.unseen_completions:
            shown = {normalized(row.reference) for row in train.rows}
            new = [row for row in validation.rows if normalized(row.reference) not in shown]
            validation.left_out[SEEN] += len(validation.rows) - len(new)
            validation.rows = new
        return {"train": train, "validation": validation}

    def _short_enough(self, rows: list[_Row]) -> _Part:
        longest = self.max_completion_chars
        if longest is None:
            return _Part(rows)
        kept = [row for row in rows if len(row.reference) <= longest]
        return _Part(kept, Counter({TOO_LONG: len(rows) - len(kept)}))

    def _parse(self, rows: Iterable[LocatedRow]) -> list[_Row]:
        parsed, number = [], 0
        for number, (where, row) in enumerate(rows, start=1):  # noqa: B007
            try:
                if isinstance(row, BadRecordError):
                    raise row
                self.num_repeated_keys += isinstance(row, RepeatedKeys)
                parsed.append(self._parse_row(row, where))
            except BadRecordError as error:
                self._skipped.add(error)
        self._skipped.log(str(self.path), len(parsed))
        if not parsed:
            found = f"no record is left: all {number} were bad"
            first = self._skipped.messages[0]
            raise BadRecordError(Location(str(self.path)), found, f"mend them; the first: {first}")
        return parsed

    def _parse_row(self, row: Mapping[str, Any], where: Location) -> _Row:
        columns = {str(k): _as_text(v) for k, v in row.items() if v is not None}
        texts = {
            name: template.format_map({key: _field(columns, key, where) for key in fields})
            for (name, template), fields in zip(
                self.templates.items(), self.fields.values(), strict=True
            )
        }
        reference = texts["completion"]
        if self.remove is not None:
            reference = self.remove.sub("", reference)
        if not reference.strip():
            raise BadRecordError(where, "the completion is empty", "leave the row out")
        prompt: Text = texts["prompt"]
        answer: Text = f" {reference}"
        if self.chat:
            system = [{"role": "system", "content": texts["system"]}] if "system" in texts else []
            prompt = (*system, {"role": "user", "content": texts["prompt"]})
            answer = ({"role": "assistant", "content": reference},)
        kept = {key: value for key, value in columns.items() if key != "prompt"}
        return _Row(
            prompt,
            answer,
            reference,
            domain="" if self.domain is None else _field(columns, self.domain, where),
            group=text_key(prompt)
            if self.split_by is None
            else _field(columns, self.split_by, where),
            columns={**kept, REFERENCE: reference},
        )


def normalized(text: str) -> str:
    """Return the text with every run of white space as one space, and none at its ends."""
    return " ".join(text.split())


def fields_of(template: str, name: str) -> tuple[str, ...]:
    """Return the names in a template's braces; `{{` and `}}` stand for braces themselves.

    Raises:
        ValueError: if there is none, or a brace holds anything but a name.
    """
    try:
        parts = list(Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"{name}={template!r} is no template: {error}") from error
    names = tuple(dict.fromkeys(key for _, key, _, _ in parts if key is not None))
    plain = all(key.isidentifier() for key in names)
    if not plain or any(spec or conversion for _, _, spec, conversion in parts):
        raise ValueError(f"{name}={template!r} must hold plain names in braces: {{field}}")
    if not names and name != "system":
        raise ValueError(f"{name}={template!r} has no {{field}}, so it is the same for every row")
    return names


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(f"remove={pattern!r} is no regular expression: {error}") from error


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _field(columns: Mapping[str, str], key: str, where: Location) -> str:
    if key not in columns:
        hint = closest(key, columns)
        meant = f"did you mean {hint!r}?" if hint else f"name one of {', '.join(columns)}"
        raise BadRecordError(where, f"the field {key!r} is missing", meant)
    if not columns[key].strip():
        found = f"the field {key!r} holds {describe(columns[key])}"
        raise BadRecordError(where, found, "fill it, or leave the row out")
    return columns[key]
