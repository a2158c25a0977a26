"""Demonstrations and prompts that are put together from the fields of a file's rows."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_lightning.arguments import Count, Seed, checked
from rlhf_lightning.data.errors import BadRecordError, Location, closest, describe
from rlhf_lightning.data.files import Row
from rlhf_lightning.data.kinds import NO_LABELS, Labels
from rlhf_lightning.data.records import DemonstrationRecord, Origin, Record, RecordKind, Split, Text
from rlhf_lightning.data.sources.base import FileSource
from rlhf_lightning.text.messages import as_text, fields_of

REFERENCE = "completion"
TOO_LONG = "completion longer than max_completion_chars"
SEEN = "held-out completion that training shows too"


@checked
@dataclass(eq=False, repr=False, kw_only=True)
class TemplateSource(FileSource):
    """Prompts and completions made of a file's fields, plain or as conversations.

    `prompt="Platform: {platform}. Task: {task}"` puts the fields `platform` and `task` of each row
    into a text. Every prompt carries the row's fields as columns for reward functions, and the
    finished completion as the column "completion". Further arguments are those of `FileSource`, but
    `columns`, which fields of templates name.

    Args:
        prompt: template of the user's message.
        completion: template of the response.
        system: template of a system message; None leaves it to the chat template.
        chat: conversations for a tokenizer with a chat template; False makes plain text, whose
            completion starts with a space.
        split_by: field whose rows all land on one side, e.g. a page of which there are several
            versions; None splits by prompt.
        seed: seeds the split; not the run's, so that every stage holds out the same.
        domain: field that metrics are split by.
        remove: regular expression; what it matches is taken out of the completion.
        max_completion_chars: rows with longer completions are left out, and counted.
        unseen_completions: leave out held-out rows whose completion training shows, and count them.

    Raises:
        ValueError: if the path is missing, a template has no field or is malformed, `remove` is no
            regular expression, or a number is out of range.
    """

    prompt: str
    completion: str = "{completion}"
    system: str | None = None
    chat: bool = True
    split_by: str | None = None
    seed: Seed = 0
    domain: str | None = None
    remove: str | None = None
    max_completion_chars: Count | None = None
    unseen_completions: bool = False

    def __post_init__(self) -> None:
        """Check the arguments; nothing is read yet."""
        super().__post_init__()
        if self.columns:
            raise ValueError(f"columns={dict(self.columns)}: name their columns in the templates")
        if self.system is not None and not self.chat:
            raise ValueError("system is given, but chat=False has no system message: leave it out")
        self.templates = {"prompt": self.prompt, "completion": self.completion}
        if self.system is not None:
            self.templates["system"] = self.system
        self.fields = {name: fields_of(text, name) for name, text in self.templates.items()}
        try:
            self._removed = None if self.remove is None else re.compile(self.remove)
        except re.error as error:
            raise ValueError(f"remove={self.remove!r} is no regular expression: {error}") from error
        self._left_out: dict[Split, Counter[str]] = {"train": Counter(), "validation": Counter()}

    def left_out(self, kind: RecordKind, split: Split) -> Mapping[str, int]:
        """Return how many good rows were left out, by reason."""
        self.parsed(split)
        return dict(+self._left_out[split])

    def _load(self) -> dict[Split, list[Record]]:
        splits = super()._load()

        def keep(split: Split, reason: str, wanted: Callable[[str], bool]) -> None:
            rows = splits[split]
            splits[split] = [row for row in rows if wanted(row.origin.columns[REFERENCE])]
            self._left_out[split][reason] = len(rows) - len(splits[split])

        longest = self.max_completion_chars or sys.maxsize
        for split in splits:
            keep(split, TOO_LONG, lambda text: len(text) <= longest)
        if self.unseen_completions:
            shown = {normalized(row.origin.columns[REFERENCE]) for row in splits["train"]}
            keep("validation", SEEN, lambda text: normalized(text) not in shown)
        return splits

    def _find_labels(self, records: Sequence[Record]) -> Labels:
        # A field of this name is often a class, which a template writes.
        values = {str(record.origin.columns.get("label")).lower() for record in records}
        are_labels = self.label_good is not None or values <= {"true", "false"}
        return super()._find_labels(records) if are_labels else NO_LABELS

    def _parser(self) -> Callable[[Row, Location], Record]:
        return self._parse_row

    def _parse_row(self, row: Row, where: Location) -> Record:
        columns = {str(k): v for k, v in row.items() if v is not None}
        texts = {
            name: self.templates[name].format_map({k: _field(columns, k, where) for k in fields})
            for name, fields in self.fields.items()
        }
        reference = texts["completion"]
        if self._removed is not None:
            reference = self._removed.sub("", reference)
        if not reference.strip():
            raise BadRecordError(where, "the completion is empty", "leave the row out")
        prompt: Text = texts["prompt"]
        answer: Text = f" {reference}"
        if self.chat:
            system = [{"role": "system", "content": texts["system"]}] if "system" in texts else []
            prompt = (*system, {"role": "user", "content": texts["prompt"]})
            answer = ({"role": "assistant", "content": reference},)
        domain = "" if self.domain is None else _field(columns, self.domain, where)
        group = "" if self.split_by is None else _field(columns, self.split_by, where)
        columns.pop("prompt", None)
        origin = Origin(where, {**columns, REFERENCE: reference}, group=group)
        return DemonstrationRecord(prompt, answer, domain, self.rendered, origin=origin)


def normalized(text: str) -> str:
    """Return the text with every run of white space as one space, and none at its ends."""
    return " ".join(text.split())


def _field(columns: Mapping[str, Any], key: str, where: Location) -> str:
    if key not in columns:
        hint = f", did you mean {hint!r}?" if (hint := closest(key, columns)) else ""
        fix = f"name one of {', '.join(columns)}{hint}"
        raise BadRecordError(where, f"the field {key!r} is missing", fix)
    text = as_text(columns[key])
    if not text.strip():
        found = f"the field {key!r} holds {describe(columns[key])}"
        raise BadRecordError(where, found, "fill it, or leave the row out")
    return text
