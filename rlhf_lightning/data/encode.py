r"""Records to token ids: the one place where prompts, responses and EOS meet.

* Prompt and response are one text, tokenized together and cut where the response starts; a token
  that has a part of both belongs to the response (`text/tokens.py`), and such records are counted.
  PPO's prompts are tokenized alone: no response follows yet.
* Plain text: special tokens at the front of the prompt only (BOS once, never an EOS).
  Conversations: the chat template is applied once and brings its own special tokens.
* A response ends with its first stop token behind the content, because generation stops there:
  nothing after it is learnt or scored. That is EOS, appended by its id, also where pad == eos; in a
  conversation it is what the chat template writes: `<|im_end|>` of ChatML (and not its line break),
  `<end_of_turn>` of Gemma, `<|end|>` of Phi 3 (and not the EOS behind it).
* The loss counts on the response and the token that ends it; for `text` records on every token but
  the first, which has nothing before it. With `loss_on="all"` each turn of the assistant is such a
  response, behind the prompt that a policy is given there. Turns whose tokens are the start of a
  later row are learnt in it. A turn that the template writes in another way later (many drop its
  thoughts) is a separate row.
* Special tokens that a text spells are text: `<|im_end|>` in a message ends no turn. A template's
  own markers are tokens, and so is what a record spells that says `rendered`.
* Over-long records are dropped, or their prompt is cut from the left. A response is never cut: a
cut text must not pass for a finished one.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field, replace
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from rlhf_lightning.data.errors import BadRecordError
from rlhf_lightning.data.progress import with_progress
from rlhf_lightning.data.records import (
    ROW_KEYS,
    DemonstrationRecord,
    LossOn,
    PreferenceRecord,
    PromptRecord,
    Record,
    TextRecord,
    UnpairedRecord,
)
from rlhf_lightning.text.messages import CONVERSATION, RENDERED, WEIGHT, BadValueError, Text
from rlhf_lightning.text.render import unread_keys, write_chat
from rlhf_lightning.text.tokens import (
    Rendered,
    TextEncoder,
    end_with_eos,
    prompt_and_responses,
    prompt_ids,
    text_encoder,
)

OverLong = Literal["drop", "truncate_left"]
OVER_LONG = "over-long"
RESPONSE_TOO_LONG = "response alone over-long"
IDENTICAL = "chosen == rejected after encoding"
NO_TOKENS = "prompt without a token"


@dataclass(frozen=True, eq=False)
class EncodedSequence:
    """A sequence to learn: `[T]` int32 ids and a `[T]` bool mask of the tokens that are learnt.

    `label` is that of an unpaired row, else None.
    """

    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    domain: str = ""
    label: bool | None = None

    def __len__(self) -> int:
        """Return the number of tokens."""
        return len(self.input_ids)


@dataclass(frozen=True, eq=False)
class EncodedPreference:
    """Two sequences `[T]` that share their first `prompt_length` tokens and end with EOS.

    `row_id` is the index among the rows of a split of a `PreferenceDataModule`. With a `label` it
    is an unpaired row: its response is on the chosen side, a response of another row on the other.
    """

    chosen_input_ids: NDArray[np.int32]
    rejected_input_ids: NDArray[np.int32]
    prompt_length: int
    margin: float = 0.0
    domain: str = ""
    subsets: tuple[str, ...] = ()
    row_id: int = 0
    label: bool | None = None

    def __len__(self) -> int:
        """Return the number of tokens of the longer side."""
        return max(len(self.chosen_input_ids), len(self.rejected_input_ids))


@dataclass(frozen=True, eq=False)
class EncodedPrompt:
    """A prompt `[P]` to respond to, with its columns; `columns["prompt"]` is its text."""

    input_ids: NDArray[np.int32]
    columns: Mapping[str, Any]
    domain: str = ""

    def __len__(self) -> int:
        """Return the number of tokens."""
        return len(self.input_ids)


Encoded = EncodedSequence | EncodedPreference | EncodedPrompt


@dataclass
class EncodingReport:
    """Counts of the encoding.

    In `num_merged` records the end of the prompt has other tokens where it stands alone;
    `num_unknown` hold text that the tokenizer does not know and writes as `<unk>` or leaves out.
    `skipped` names the bad records that were left out. `taken` counts the rows that are a part of a
    row of another kind, by what they are of it. `unread` counts the keys of messages and of
    `chat_template_kwargs` that the template does not read, `unread_columns` the columns that
    nothing reads.
    """

    num_truncated: int = 0
    num_merged: int = 0
    num_unknown: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    skipped: list[str] = field(default_factory=list)
    taken: Counter[str] = field(default_factory=Counter)
    unread: Counter[str] = field(default_factory=Counter)
    unread_columns: Counter[str] = field(default_factory=Counter)


@dataclass
class RecordEncoder:
    """Makes rows of records, and counts what becomes of them in its `report`.

    Args:
        tokenizer: makes ids of them; its `TextEncoder` saves the time to make one.
        max_length: most tokens of a row.
        over_long: what to do with longer ones.
        loss_on: `"last"` response of a demonstration, or `"all"` turns of the assistant.
        report: counts, from 0.
    """

    tokenizer: InitVar[PreTrainedTokenizerBase | TextEncoder]
    _: KW_ONLY
    max_length: int
    over_long: OverLong = "drop"
    loss_on: LossOn = "last"
    report: EncodingReport = field(default_factory=EncodingReport)

    def __post_init__(self, tokenizer: PreTrainedTokenizerBase | TextEncoder) -> None:
        """Make the encoder of the tokenizer."""
        self.encoder = text_encoder(tokenizer)

    def __call__(self, record: Record) -> list[Encoded]:
        """Return the rows of a record: one, or several turns of it, or none where it is left out.

        Raises:
            ValueError: if the tokenizer has no EOS token.
            BadRecordError: if there is no chat template for a conversation, or it refuses the
                record, does not write all of it, or does not keep the prompt as a prefix, unless
                such records are skipped.
        """
        try:
            rows = self._rows(record)
        except BadValueError as error:
            bad = BadRecordError(record.place, error.found, error.fix)
            if not record.origin.skip:
                raise bad from error
            self.report.skipped.append(str(bad))
            return []
        return [row for row in rows if row is not None]

    def encode_all(self, records: Iterable[Record]) -> list[Any]:
        """Return the rows of records of one kind in their order, without the dropped ones.

        Raises:
            ValueError: if a record cannot be encoded, naming its number.
        """
        encoder, report = self.encoder, self.report
        everything = list(records)
        encoded: list[Any] = []
        for at, record in enumerate(with_progress(everything, "encoding", len(everything))):
            try:
                rows = self(record)
            except ValueError as error:
                if isinstance(error, BadRecordError) and record.origin.where is not None:
                    raise
                raise ValueError(f"record {at + 1}: {error}") from error
            encoded += rows
            if not rows:
                continue
            if taken := record.origin.taken:
                report.taken[taken] += len(rows)
            texts = _texts(record)
            messages = [m for text in texts if not isinstance(text, str) for m in text]
            if messages or record.variables:
                report.unread.update(unread_keys(messages, record.variables, encoder.tokenizer))
            every = not isinstance(record, PromptRecord | TextRecord)  # else rewards get them
            report.unread_columns.update(k for k in record.origin.unread if every or k in ROW_KEYS)
            unknown = any(_holds(row, encoder.unknown) for row in rows) or encoder.drops(*texts)
            report.num_unknown += not record.rendered and unknown
        return encoded

    def _rows(self, record: Record) -> Sequence[Encoded | None]:
        if isinstance(record, TextRecord):
            return [self._text(record)]
        if isinstance(record, PromptRecord):
            return [self._prompt(record)]
        if isinstance(record, PreferenceRecord):
            return [self._preference(record)]
        if self.loss_on == "all" and not isinstance(record, UnpairedRecord):
            return self._all_turns(record)
        return [self._demonstration(record)]

    def _text(self, record: TextRecord) -> EncodedSequence | None:
        """Return BOS (where the tokenizer has one at the front), the text and EOS."""
        ids = prompt_ids(record.text, self.encoder, rendered=record.rendered)
        kept = self._cut(end_with_eos(ids, self.encoder.eos))
        return None if kept is None else _sequence(kept, num_given=1, domain=record.domain)

    def _prompt(self, record: PromptRecord) -> EncodedPrompt | None:
        """Return the prompt alone, with the columns of `prompt_columns`."""
        ids = prompt_ids(
            record.prompt, self.encoder, rendered=record.rendered, variables=record.variables
        )
        if not ids:
            self.report.dropped[NO_TOKENS] += 1
            return None
        kept = self._cut(ids)
        if kept is None:
            return None
        columns = prompt_columns(record, self.encoder.tokenizer)
        return EncodedPrompt(_ids(kept), columns, record.domain)

    def _demonstration(self, record: DemonstrationRecord) -> EncodedSequence | None:
        """Return prompt, completion and EOS, the last two trained.

        An empty prompt of a tokenizer without BOS leaves the completion's first token untrained.
        """
        (rendered,) = self._rendered(record, record.completion)
        prompt = self._cut(rendered.prompt, len(rendered.response))
        if prompt is None:
            return None
        self.report.num_merged += rendered.is_merged
        ids = [*prompt, *rendered.response]
        row = _sequence(ids, num_given=max(len(prompt), 1), domain=record.domain)
        return replace(row, label=record.label) if isinstance(record, UnpairedRecord) else row

    def _all_turns(self, record: DemonstrationRecord) -> list[EncodedSequence]:
        """Return rows in which every turn of the assistant is trained once, but those of weight 0.

        Most templates need one row; see the top of this module.
        """
        rows: list[EncodedSequence] = []
        for turn in _turns(record):
            row = self._demonstration(turn)
            if row is None:
                continue
            size = len(row)
            same = (r for r in rows if np.array_equal(r.input_ids[:size], row.input_ids))
            if (later := next(same, None)) is None:
                rows.append(row)
            else:
                later.loss_mask[:size] |= row.loss_mask
        return rows[::-1]

    def _preference(self, record: PreferenceRecord) -> EncodedPreference | None:
        """Return both responses behind the same (perhaps cut) prompt, EOS included."""
        first, second = self._rendered(record, record.chosen, record.rejected)
        chosen, rejected = first.response, second.response
        if chosen == rejected:
            self.report.dropped[IDENTICAL] += 1
            return None
        prompt = self._cut(first.prompt, max(len(chosen), len(rejected)))
        if prompt is None:
            return None
        self.report.num_merged += first.is_merged
        return EncodedPreference(
            _ids([*prompt, *chosen]),
            _ids([*prompt, *rejected]),
            prompt_length=len(prompt),
            margin=record.margin or 0.0,
            domain=record.domain,
            subsets=record.subsets,
        )

    def _rendered(self, record: Any, *responses: Text) -> list[Rendered]:
        how = {"rendered": record.rendered, "variables": record.variables}
        return prompt_and_responses(record.prompt, responses, self.encoder, **how)

    def _cut(self, prompt: list[int], num_response: int = 0) -> list[int] | None:
        """Return a prompt, cut from the left if it must and may be; None drops the record."""
        room, bos = self.max_length - num_response, self.encoder.bos
        if len(prompt) <= room:
            return prompt
        if self.over_long == "drop" or room < 1:
            self.report.dropped[OVER_LONG if self.over_long == "drop" else RESPONSE_TOO_LONG] += 1
            return None
        self.report.num_truncated += 1
        # behind BOS where BOS marks the start, and not every turn
        if prompt[0] == bos and prompt.count(bos) == 1 and room > 1:
            return [prompt[0], *prompt[len(prompt) - room + 1 :]]
        return prompt[len(prompt) - room :]


def encode_prompt(
    record: PromptRecord,
    tokenizer: PreTrainedTokenizerBase | TextEncoder,
    *,
    max_length: int,
    over_long: OverLong = "drop",
    report: EncodingReport | None = None,
) -> EncodedPrompt | None:
    """Return the row of a prompt, None if it is dropped; see `RecordEncoder`."""
    report = report or EncodingReport()
    encode = RecordEncoder(tokenizer, max_length=max_length, over_long=over_long, report=report)
    return cast(EncodedPrompt | None, next(iter(encode(record)), None))


def _holds(row: Encoded, token: int | None) -> bool:
    """Return True if a row holds a token."""
    ids = (x for x in vars(row).values() if isinstance(x, np.ndarray) and x.dtype != bool)
    return token is not None and any(bool((x == token).any()) for x in ids)


def give_same_columns(*splits: list[Any]) -> None:
    """Give all prompts of all splits the columns that one has, None where a prompt lacks it.

    So a reward function is given the same columns in every batch.
    """
    prompts = [row for rows in splits for row in rows if isinstance(row, EncodedPrompt)]
    lacking = dict.fromkeys(name for row in prompts for name in row.columns)
    for rows in splits if lacking else ():
        rows[:] = [replace(row, columns=lacking | dict(row.columns)) for row in rows]


def _texts(record: Record) -> tuple[Text, ...]:
    """Return the prompt of a record, or its text, and the responses to it."""
    if isinstance(record, PreferenceRecord):
        return record.prompt, record.chosen, record.rejected
    if isinstance(record, DemonstrationRecord):
        return record.prompt, record.completion
    return (record.text if isinstance(record, TextRecord) else record.prompt,)


def _turns(record: DemonstrationRecord) -> Iterator[DemonstrationRecord]:
    """Yield each learnt turn of the assistant with the messages before it, the last one first."""
    if isinstance(record.prompt, str):
        fix = "give messages, or learn the response alone with data.loss_on=last"
        raise BadValueError("data.loss_on=all is of conversations, and this is plain text", fix)
    messages = (*record.prompt, *record.completion)
    for at in reversed(range(len(messages))):
        if messages[at]["role"] != "assistant" or messages[at].get(WEIGHT) == 0:
            continue
        said = messages[at]["content"].strip() or "tool_calls" in messages[at]
        if not at or not said:
            found = f"message {at + 1} (assistant) is empty, or answers no message"
            raise BadValueError(found, "fill it, or give it weight: 0")
        yield replace(record, prompt=messages[:at], completion=messages[at : at + 1])


def prompt_columns(record: PromptRecord, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return the record's columns and its prompt.

    `prompt` is the plain prompt, or the conversation as the template writes it; then `CONVERSATION`
    holds the conversation itself as JSON, for models that have another template, and in front of it
    the further variables of the template, if any; of a `rendered` prompt it holds true.
    """
    columns = {k: v for k, v in record.columns.items() if k != CONVERSATION}
    if isinstance(record.prompt, str):
        rendered = {CONVERSATION: RENDERED} if record.rendered else {}
        return columns | rendered | {"prompt": record.prompt}
    messages = [dict(message) for message in record.prompt]
    written = [dict(record.variables), messages] if record.variables else messages
    columns[CONVERSATION] = json.dumps(written, ensure_ascii=False, default=str)
    return columns | {"prompt": write_chat(record.prompt, tokenizer, variables=record.variables)}


def _sequence(ids: Sequence[int], *, num_given: int, domain: str) -> EncodedSequence:
    return EncodedSequence(_ids(ids), np.arange(len(ids)) >= num_given, domain)


def _ids(ids: Sequence[int]) -> NDArray[np.int32]:
    return np.asarray(ids, dtype=np.int32)
