"""The five kinds of record that data sources yield, in TRL's vocabulary.

A text is plain (`str`) or conversational (a tuple of `{"role", "content"}` mappings). What it
spells is text, `<|im_end|>` too; `rendered` says that special tokens which it spells are tokens, as
in a text that a chat template has written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from rlhf_lightning.data.errors import Location
from rlhf_lightning.text.messages import SYSTEM, THOUGHT, Text, as_text

RecordKind = Literal["texts", "prompts", "demonstrations", "preferences", "unpaired"]
Split = Literal["train", "validation"]
LossOn = Literal["last", "all"]  # responses of a conversation that are learnt
Value = str | int | float | bool  # of a label
RowT = TypeVar("RowT")

SIDES = ("chosen", "rejected")
VARIABLES = ("tools", "documents", "chat_template_kwargs")  # columns, of the chat template
KEYS = {  # of a row, by the kind of its record
    "texts": "text",
    "prompts": "prompt",
    "demonstrations": "prompt and completion, or messages",
    "preferences": "prompt, chosen and rejected",
    "unpaired": "prompt, completion and label",
}
ROW_KEYS = (*VARIABLES, "system", "history")  # columns of a conversation, beside its texts
_SAID = (THOUGHT, "tool_calls")  # of a message, beside its content
ROLES = (*SYSTEM, "user", "assistant", "tool")


@dataclass(frozen=True)
class Origin:
    """The row of a source that a record was read from.

    Args:
        where: file and line; None where it was read from neither.
        columns: all columns but the prompt, the domain and `rendered`, in their own types.
        unread: names of the columns that nothing reads.
        group: rows of one group are on one side of a split; "" for those of one prompt.
        sides: both sides of a plain pair as given, where the prompt is what they share.
        taken: what of a row of another kind the record is; "" of one of its own.
        skip: leave the record out, counted and named, where a chat template does not write it in
            full; else it is an error.
    """

    where: Location | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)
    unread: tuple[str, ...] = ()
    group: str = ""
    sides: tuple[str, ...] = ()
    taken: str = ""
    skip: bool = False


@dataclass(frozen=True, kw_only=True)
class _Row:
    """Fields that records of any kind share: origin and further variables of the chat template."""

    variables: Mapping[str, Any] = field(default_factory=dict, hash=False)
    origin: Origin = field(default_factory=Origin, compare=False, repr=False)

    @property
    def place(self) -> Location:
        """The place of the record, for errors."""
        return self.origin.where or Location("a record")


@dataclass(frozen=True)
class TextRecord(_Row):
    """Language-modelling text: every token is learnt (TRL: `text`)."""

    text: str
    domain: str = ""
    rendered: bool = False


@dataclass(frozen=True)
class PromptRecord(_Row):
    """A prompt to respond to.

    Args:
        prompt: a text, or a list of messages.
        domain: a name that metrics are split by, "" where there is none.
        columns: further columns of the row in their own types, for reward functions.
        rendered: special tokens that the prompt spells are tokens.
    """

    prompt: Text
    domain: str = ""
    columns: Mapping[str, Any] = field(default_factory=dict)
    rendered: bool = False


@dataclass(frozen=True)
class DemonstrationRecord(_Row):
    """A prompt and the response to imitate."""

    prompt: Text
    completion: Text
    domain: str = ""
    rendered: bool = False


@dataclass(frozen=True)
class UnpairedRecord(DemonstrationRecord):
    """A prompt and a response with a label: True where the response is desirable (TRL: `label`)."""

    label: bool = True


@dataclass(frozen=True)
class PreferenceRecord(_Row):
    """A prompt with a preferred and a rejected response.

    Args:
        prompt: a text, or a list of messages.
        chosen: the preferred response, in the form of the prompt.
        rejected: the other response, in the same form.
        domain: a name that metrics are split by, "" where there is none.
        margin: how much better `chosen` is, in units of the reward; None where not known.
        subsets: names of the subsets of held-out pairs that it belongs to; the final accuracy is
            measured on each.
        rendered: special tokens that its texts spell are tokens.
    """

    prompt: Text
    chosen: Text
    rejected: Text
    domain: str = ""
    margin: float | None = None
    subsets: tuple[str, ...] = ()
    rendered: bool = False


Record = TextRecord | PromptRecord | DemonstrationRecord | PreferenceRecord


def both_responses(pair: PreferenceRecord) -> list[UnpairedRecord]:
    """Return a pair as two unpaired rows: the chosen response is desirable, the other is not."""
    more: dict[str, Any] = {"variables": pair.variables, "origin": pair.origin}
    return [
        UnpairedRecord(pair.prompt, response, pair.domain, pair.rendered, label, **more)
        for response, label in ((pair.chosen, True), (pair.rejected, False))
    ]


def prompt_key(record: Record) -> str:
    """Return the identity by which records are split: the prompt, or the text of a text record.

    Records of one prompt have one key whatever their kind, so a prompt held out from SFT is held
    out from reward modelling and PPO too when the sources share a seed. A conversation and its
    plain text have different keys.
    """
    if isinstance(record, TextRecord):
        return record.text
    return text_key(record.prompt)


def question_key(record: Record) -> str:
    """Return the identity of what is asked: the prompt, with its documents, tools and the like."""
    return prompt_key(record) + repr(record.variables)


def first_of_each(rows: Iterable[RowT], key: Callable[[RowT], str]) -> list[RowT]:
    """Return the first row of each key, in the order in which they come."""
    found: dict[str, RowT] = {}
    for row in rows:
        found.setdefault(key(row), row)
    return list(found.values())


def text_key(text: Text) -> str:
    """Return a string that is equal for equal texts only."""
    if isinstance(text, str):
        return text
    parts = [[m["role"], m["content"], *(m[k] for k in _SAID if k in m)] for m in text]
    return json.dumps(parts, ensure_ascii=False, default=str)


def with_system_in_user(prompt: Text) -> Text:
    """Return a prompt whose system messages are moved to the front of the user's next one."""
    if isinstance(prompt, str):
        return prompt
    messages: list[Mapping[str, Any]] = []
    for message in prompt:
        if message["role"] == "user":
            waiting = [m["content"] for m in messages if m["role"] in SYSTEM]
            messages = [m for m in messages if m["role"] not in SYSTEM]
            message = {**message, "content": "\n\n".join([*waiting, message["content"]])}
        messages.append(message)
    return tuple(messages)


def as_columns(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns that give a record these variables, see `formats.with_row_keys`."""
    named = {key: variables[key] for key in VARIABLES[:-1] if key in variables}
    others = {key: each for key, each in variables.items() if key not in named}
    return named | ({VARIABLES[-1]: others} if others else {})


def check_split(split: str) -> None:
    """Check the name of a split.

    Raises:
        ValueError: if it is unknown.
    """
    if split not in ("train", "validation"):
        raise ValueError(f"split={split!r} is unknown: use 'train' or 'validation'")


def kind_of(record: Record) -> RecordKind:
    """Return the name of the record's kind."""
    return KINDS[type(record)]


def asked_columns(reward: object, rows: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return the prompt columns that a gold reward's `columns` names as text, "" where one lacks.

    Args:
        reward: asks for none without that attribute.
        rows: columns of each prompt.

    Raises:
        ValueError: if no prompt has one of them.
    """
    names: Sequence[str] = getattr(reward, "columns", ())
    known = sorted({name for row in rows for name in row})
    for name in names:
        if name not in known:
            found = f"the gold reward asks for the prompt column {name!r}, prompts have {known}"
            raise ValueError(f"{found}: give the records that column, or another gold reward")
    return {name: [as_text(row.get(name)) for row in rows] for name in names}


KINDS: dict[type, RecordKind] = {
    TextRecord: "texts",
    PromptRecord: "prompts",
    DemonstrationRecord: "demonstrations",
    PreferenceRecord: "preferences",
    UnpairedRecord: "unpaired",
}
