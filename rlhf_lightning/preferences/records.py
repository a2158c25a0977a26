"""Records that pass between the parts of the preference lab: candidates, pairs and labels.

Each is a frozen dataclass and one JSON object a line; names of records are hashes of what they say,
so that reading the same file twice adds nothing. Journals append lines that a kill leaves whole.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar, get_args

from pydantic import AfterValidator, Field

from rlhf_lightning.arguments import AtLeast0, Checked
from rlhf_lightning.data.errors import BadRecordError, Location, describe
from rlhf_lightning.data.files import checked_rows
from rlhf_lightning.data.records import ROLES, VARIABLES, Text, text_key
from rlhf_lightning.runs.atomic import sync_folder, write_text

Choice = Literal["first", "second", "tie", "both_bad", "skip"]
Side = Literal["first", "second"]
Kind = Literal["person", "rule", "judge", "simulated", "reward_model"]
SIDES: tuple[Side, Side] = get_args(Side)  # type: ignore[assignment]
Filled = Annotated[str, Field(min_length=1)]


def _checked_prompt(prompt: Any) -> Text:
    if isinstance(prompt, str) and prompt.strip():
        return prompt
    messages = prompt if isinstance(prompt, list | tuple) else ()
    if not messages or not all(
        isinstance(message, Mapping)
        and message.get("role") in ROLES
        and isinstance(message.get("content"), str)
        for message in messages
    ):
        wanted = f'{{"role": ..., "content": ...}} with a role of {", ".join(ROLES)}'
        raise ValueError(f" is {describe(prompt)}, expected a text, or messages {wanted}")
    return tuple(dict(message) for message in messages)


Prompt = Annotated[Any, AfterValidator(_checked_prompt)]  # a `Text`


@dataclass(frozen=True)
class Candidate(Checked):
    """One response of one policy to one prompt.

    Args:
        prompt_id: `name_of` the prompt.
        prompt: plain text, or messages `{"role", "content"}`.
        domain: a name that figures are split by, "" where there is none.
        response: text of the response.
        model: author: a policy's name, a folder or a hub name.
        settings: settings of decoding, e.g. `{"temperature": 0.7, "top_p": 0.9}`.
        seed: seed of the sampling noise.
        response_id: `name_of` prompt and response.
        finished: whether the response ended by itself; None where not known.
        columns: further text columns of the prompt, such as the right answer, for gold rewards.
    """

    prompt_id: Filled
    prompt: Prompt
    domain: str
    response: str
    model: Filled
    settings: Mapping[str, float]
    seed: int
    response_id: Filled
    finished: bool | None = None
    columns: Mapping[str, str] = field(default_factory=dict, hash=False)

    @classmethod
    def make(cls, prompt: Text, response: str, *, domain: str = "", **rest: Any) -> Candidate:
        """Return the candidate with its two names made from what it says."""
        columns = rest.get("columns", {})
        name = name_of("response", prompt, response, columns=columns)
        asked = name_of("prompt", prompt, columns=columns)
        return cls(asked, prompt, domain, response, response_id=name, **rest)

    @property
    def source(self) -> str:
        """Author and settings in one line: `sft temperature=0.7 top_p=0.9 seed=1`."""
        settings = (f"{key}={value:g}" for key, value in self.settings.items())
        return " ".join((self.model, *settings, f"seed={self.seed}"))


@dataclass(frozen=True)
class Pair(Checked):
    """Two different responses to one prompt, to be compared.

    Args:
        pair_id: `name_of` prompt and responses in this order.
        prompt: plain text, or messages `{"role", "content"}`.
        prompt_id: `name_of` the prompt.
        domain: a name that figures are split by, "" where there is none.
        first: one response as text.
        second: the other response as text.
        first_source: author of the first, such as `Candidate.source`; "" where not known.
        second_source: the same of the other one.
        columns: further text columns of the prompt, such as the right answer, for gold rewards.
    """

    pair_id: Filled
    prompt_id: Filled
    prompt: Prompt
    domain: str
    first: str
    second: str
    first_source: str = ""
    second_source: str = ""
    columns: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        """Check the fields, and that there is something to compare."""
        super().__post_init__()
        if self.first == self.second:
            raise ValueError("Pair.first and Pair.second are the same text: leave the pair out")

    @classmethod
    def make(cls, prompt: Text, first: str, second: str, *, domain: str = "", **rest: Any) -> Pair:
        """Return the pair with its names made from what it says."""
        columns = rest.get("columns", {})
        name = name_of("pair", prompt, first, second, columns=columns)
        asked = name_of("prompt", prompt, columns=columns)
        return cls(name, asked, prompt, domain, first, second, **rest)


@dataclass(frozen=True)
class Label(Checked):
    """The judgement of one annotator on one pair.

    Args:
        pair_id: id of the pair.
        annotator: name; one name is one annotator.
        choice: the better response **of the pair**, wherever it was shown; `tie`, `both_bad`, or
            `skip` for no opinion, which counts nowhere.
        kind: kind of annotator.
        order: the response of the pair that was shown first; of an annotator that saw both orders,
            or none, "first".
        created: time, for people who read the file; ours in ISO 8601 with its zone.
        seconds: time taken; None where not measured.
        reason: comment; None where none was given.
        margin: certainty, in the annotator's units, at least 0; None where not known.
    """

    pair_id: Filled
    annotator: Filled
    choice: Choice
    kind: Kind
    order: Side
    created: Filled
    seconds: AtLeast0 | None = None
    reason: str | None = None
    margin: AtLeast0 | None = None


Answer = tuple[Text, str] | tuple[Text, str, Mapping[str, str]]


def name_of(kind: str, prompt: Text, *responses: str, columns: Mapping[str, str]) -> str:
    """Return the name of a prompt, or of responses to it in this order, whoever wrote them.

    It is a hash of their text; of a conversation, of its roles, contents and variables.
    """
    variables = _variables(prompt, columns).items()
    parts = (kind, text_key(prompt), *responses, *(part for both in variables for part in both))
    # The lengths keep ("ab", "c") and ("a", "bc") apart; a lone surrogate has no UTF-8.
    text = "".join(f"{len(part)}:{part}" for part in parts)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=12).hexdigest()


def _variables(prompt: Text, columns: Mapping[str, str]) -> dict[str, str]:
    used = () if isinstance(prompt, str) else VARIABLES
    return {key: columns[key] for key in used if key in columns}


def readable(text: Text) -> str:
    """Return a prompt as one text: messages are `role: content`, with an empty line between."""
    if isinstance(text, str):
        return text
    return "\n\n".join(f"{m['role']}: {said_in(m)}" for m in text)


def turns_of(pair: Pair) -> list[tuple[str, str]]:
    """Return role and text of each turn of a pair's prompt, its documents and tools first.

    A plain prompt is one turn without a role.
    """
    if isinstance(pair.prompt, str):
        return [("", pair.prompt)]
    given = variables_of(pair)
    shown = [(key, given[key]) for key in ("documents", "tools") if key in given]
    return [*shown, *((message["role"], said_in(message)) for message in pair.prompt)]


def shown_prompt(pair: Pair) -> str:
    """Return what `turns_of` has of a pair's prompt as one text."""
    return "\n\n".join(f"{role}: {text}" if role else text for role, text in turns_of(pair))


def said_in(message: Mapping[str, Any]) -> str:
    """Return the content of a message, with each call of a tool as a line of JSON below it."""
    calls = (call.get("function", call) for call in message.get("tool_calls") or ())
    lines = [json.dumps(call, ensure_ascii=False, default=str) for call in calls]
    return "\n".join([message["content"]] * bool(message["content"] or not lines) + lines)


def answered(record: Candidate | Pair, response: str) -> Answer:
    """Return a response with its prompt, and the variables of `variables_of` where it has some."""
    variables = variables_of(record)
    return (record.prompt, response, variables) if variables else (record.prompt, response)


def variables_of(record: Candidate | Pair) -> dict[str, str]:
    """Return the columns of a record that are variables of the chat template of its prompt."""
    return _variables(record.prompt, record.columns)


RecordT = TypeVar("RecordT")


def to_row(record: Any) -> dict[str, Any]:
    """Return the record as plain JSON values, without keys that hold None and empty `columns`."""
    content = record if isinstance(record, dict) else asdict(record)
    return {k: v for k, v in content.items() if v is not None and (v or k != "columns")}


def from_row(cls: type[RecordT], row: Mapping[str, Any], where: Location) -> RecordT:
    """Return the record of a row.

    Raises:
        BadRecordError: with the place, for an unknown or missing key or a value that cannot be.
    """
    try:
        return cls(**row)
    except (TypeError, ValueError) as error:
        keys = ", ".join(getattr(cls, "__dataclass_fields__", ()))
        fix = f"mend it, or leave the line out; the keys of {cls.__name__} are {keys}"
        raise BadRecordError(where, str(error), fix) from error


def read_records(cls: type[RecordT], path: str | Path) -> Iterator[RecordT]:
    """Yield the records of a JSON Lines file (or .json, .csv, .parquet) in its order.

    Raises:
        BadRecordError: for a file or a line that cannot be read.
    """
    for where, row in checked_rows(Path(path)):
        yield from_row(cls, row, where)


def completion_of(prompt: Text, response: str) -> Any:
    """Return a response in the form of its prompt: as text, or as messages."""
    # A conversation's response is its last message, or the chat template would not be applied.
    return response if isinstance(prompt, str) else [{"role": "assistant", "content": response}]


class Journal(Generic[RecordT]):
    """A JSON Lines file that survives a kill during a write.

    A line that a kill cut short is not read, and is dropped before something is appended to the
    file, so that what follows does not stick to it; reading changes nothing. A batch is on disk
    when `append` returns; a batch that was being written may be there in part.

    Args:
        path: path of the file; need not exist.
        kind: class of the records, a dataclass or dict.
    """

    def __init__(self, path: Path | str, kind: type[RecordT]) -> None:
        self.path = Path(path)
        self.kind = kind
        self._is_whole = False

    def append(self, records: Iterable[RecordT]) -> None:
        """Write the records and wait until they are on disk."""
        rows = map(to_row, records)
        lines = [json.dumps(row, ensure_ascii=False, allow_nan=False) for row in rows]
        if not lines:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not self._is_whole:
            _drop_torn_line(self.path)
            self._is_whole = True
        new = not self.path.exists()
        text = "".join(line + "\n" for line in lines)
        with self.path.open("ab") as file:
            # JSON escapes what UTF-8 does not have, a lone surrogate, in the same way.
            file.write(text.encode("utf-8", "backslashreplace"))
            file.flush()
            os.fsync(file.fileno())
        if new:
            sync_folder(self.path.parent)

    def read(self) -> list[RecordT]:
        """Return the records in the order in which they were appended; a missing file has none.

        Raises:
            BadRecordError: for a line that is not what was written.
        """
        if not self.path.exists():
            return []
        lines = self.path.read_bytes().split(b"\n")[:-1]
        located = ((Location(str(self.path), n), line) for n, line in enumerate(lines, start=1))
        return [from_row(self.kind, json.loads(line), where) for where, line in located]


def write_records(path: Path | str, records: Iterable[Candidate | Pair | Label]) -> None:
    """Write the records as JSON Lines in one step."""
    write_rows(path, (to_row(record) for record in records))


def write_rows(path: Path | str, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write plain JSON values, one a line, in one step."""
    lines = (json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
    write_text(Path(path), "".join(lines))


def _drop_torn_line(path: Path) -> None:
    if not path.exists():
        return
    with path.open("r+b") as file:
        content = file.read()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            file.truncate(whole)
            file.flush()
            os.fsync(file.fileno())
