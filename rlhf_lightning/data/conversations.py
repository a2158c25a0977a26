r"""Checks of plain and conversational texts, transcripts, and the prompt that two responses imply.

A transcript is a whole dialogue in one text, as Anthropic/hh-rlhf writes it:
`\n\nHuman: ...\n\nAssistant: ...\n\nHuman: ...\n\nAssistant: ...`
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

from rlhf_lightning.data.errors import BadRecordError, Location, describe
from rlhf_lightning.data.records import Origin, Record, TextRecord
from rlhf_lightning.data.turns import CALLS, check_characters, parse_message
from rlhf_lightning.text.forms import SYSTEM, THOUGHT, WEIGHT
from rlhf_lightning.text.messages import Messages, Text

SPEAKERS = {"Human": "user", "Assistant": "assistant"}
ANSWER_MARK = "\n\nAssistant:"
SIDES = ("chosen", "rejected")
_TURN = re.compile(r"\n\n(Human|Assistant):")


def parse_text(value: Any, key: str, where: Location) -> Text:
    """Return a plain text or a conversation.

    Raises:
        BadRecordError: if it is neither text nor a list of messages.
    """
    if isinstance(value, str):
        check_characters(value, f"the key {key!r}", where)
        return value
    if isinstance(value, list | tuple):
        return parse_messages(value, key, where)
    found = f"the key {key!r} holds {describe(value)}, expected text or a list of messages"
    raise BadRecordError(where, found, 'write "..." or [{"role": "user", "content": "..."}]')


def parse_messages(value: Any, key: str, where: Location) -> Messages:
    """Return a conversation, its messages as `turns.parse_message` reads them.

    Raises:
        BadRecordError: if it is no list, empty, or has a message without a known role and a text.
    """
    if not isinstance(value, list | tuple):
        found = f"the key {key!r} holds {describe(value)}, expected a list of messages"
        raise BadRecordError(where, found, 'write [{"role": "user", "content": "..."}, ...]')
    if not value:
        fix = "fill it, or leave the record out"
        raise BadRecordError(where, f"the key {key!r} holds an empty list", fix)
    return tuple(parse_message(m, f"{key}[{i}]", where) for i, m in enumerate(value))


def check_prompt(prompt: Text, where: Location) -> None:
    """Check that a conversation asks for a response.

    Raises:
        BadRecordError: if its last message is the assistant's.
    """
    if not isinstance(prompt, str) and prompt and prompt[-1]["role"] == "assistant":
        found = "the last message of 'prompt' is from 'assistant', which leaves nothing to answer"
        raise BadRecordError(where, found, "end the prompt with a message from 'user'")


def placed(record: Record, origin: Origin, system_into_user: bool) -> Record:
    """Return a record with its origin, and its system messages in the user's turns on request."""
    if system_into_user and not isinstance(record, TextRecord):
        return replace(record, origin=origin, prompt=with_system_in_user(record.prompt))
    return replace(record, origin=origin)


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


def check_response(prompt: Text, answer: Text, key: str, where: Location) -> None:
    """Check that a response fits its prompt.

    Raises:
        BadRecordError: if one is plain and the other conversational, if the response is empty, or
            if it is not one message of the assistant: results of tools and the template's marks
            between two turns are not what a policy writes.
    """
    if isinstance(prompt, str) != isinstance(answer, str):
        found = f"'prompt' is {style(prompt)} but {key!r} is {style(answer)}"
        fix = "write both as text or both as lists of messages"
        if len(answer) > 1 and not isinstance(answer, str):
            fix = f"take the prompt from the conversation with {_whole(key)}"
        raise BadRecordError(where, found, fix)
    if isinstance(answer, str):
        if not answer.strip():
            raise _empty(key, where)
        return
    if not prompt:
        found = f"no message comes before {key!r}, so it answers nothing"
        raise BadRecordError(where, found, "give the question under the key 'prompt'")
    roles = [m["role"] for m in answer]
    if roles != ["assistant"]:
        strange = [f"has a message from {role!r}" for role in roles if role != "assistant"]
        several = f"has {len(roles)} messages" if roles else "is empty after the shared ones"
        got = strange[0] if strange else several
        found = f"{key!r} {got}, expected only the assistant's response, one message"
        fix = "move the earlier messages to 'prompt', or where they repeat it read them alone with"
        raise BadRecordError(where, found, f"{fix} {_whole(key)}")
    if answer[-1].get(WEIGHT) == 0:
        found = (
            f"the response of {key!r} has weight 0 (or train or loss: false), so nothing is learnt"
        )
        fix = (
            "end with a response that is learnt, or skip it with dataset.source.on_bad_record=skip"
        )
        raise BadRecordError(where, found, fix)
    if not answer[-1]["content"].strip() and CALLS not in answer[-1]:
        raise _empty(key, where)


def _whole(key: str) -> str:
    """Return the columns with which a side that is a whole conversation is read."""
    own = "" if key in SIDES else f"messages: {key}, {key}: null, "
    return f"columns={{{own}prompt: null}}"


def _empty(key: str, where: Location) -> BadRecordError:
    found = f"the response of {key!r} is empty: it would teach to say nothing"
    return BadRecordError(where, found, "fill it, or leave the record out")


def implied_prompt(
    prompt: Text | None, chosen: Text, rejected: Text, where: Location
) -> tuple[Text, Text, Text]:
    """Return prompt, chosen and rejected; an implied prompt is taken out of the responses.

    Conversations share their first messages. Plain texts share their longest common prefix, cut
    back to a word's end, so that no word is split and the prompt does not end in white space;
    without a shared word the prompt is "". A plain prompt is also removed from conversations that
    contain it (as in some published sets).

    Raises:
        BadRecordError: if one response is plain and the other conversational.
    """
    if isinstance(chosen, str) != isinstance(rejected, str):
        found = "'chosen' and 'rejected' are not both plain or both conversational"
        raise BadRecordError(where, found, "write both as text or both as lists of messages")
    if isinstance(chosen, str) and isinstance(rejected, str):
        if prompt is not None:
            return prompt, chosen, rejected
        cut = _shared_words(chosen, rejected)
        return chosen[:cut], chosen[cut:], rejected[cut:]
    shared = num_shared(chosen, rejected)
    contents = [" ".join(m["content"].split()) for m in chosen[:shared] if not isinstance(m, str)]
    if isinstance(prompt, str) and " ".join(prompt.split()) in contents:
        prompt = None
    if prompt is not None:
        return prompt, chosen, rejected
    return chosen[:shared], chosen[shared:], rejected[shared:]


def style(text: Text) -> str:
    """Return the name of a text's style."""
    return "plain" if isinstance(text, str) else "conversational"


def num_shared(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return how many parts are alike at the start; ids and times of messages may differ."""
    pairs = zip(first, second, strict=False)
    return sum(1 for _ in takewhile(lambda pair: _said(pair[0]) == _said(pair[1]), pairs))


def _said(part: Any) -> Any:
    if isinstance(part, str):
        return part
    return [part.get(key) for key in ("role", "content", THOUGHT, CALLS)]


def _shared_words(first: str, second: str) -> int:
    """Return the length of the common prefix that ends with a whole word in both.

    Of transcripts it ends where the last shared turn of the assistant begins.
    """
    cut = num_shared(first, second)
    if is_transcript(first) and is_transcript(second):
        # Never inside a response: two responses may begin alike.
        turn = first[:cut].rfind(ANSWER_MARK)
        return turn + len(ANSWER_MARK) if turn >= 0 else 0
    ends = all(cut == len(text) or text[cut].isspace() for text in (first, second))
    if not ends:
        while cut > 0 and not first[cut - 1].isspace():
            cut -= 1
    return len(first[:cut].rstrip())


def is_transcript(text: object) -> bool:
    r"""Return True for a text that starts with `\n\nHuman:`."""
    return isinstance(text, str) and text.startswith("\n\nHuman:")


def parse_transcript(text: object, key: str, where: Location) -> list[dict[str, str]]:
    r"""Return the messages of a transcript, white space around each removed.

    Args:
        text: transcript, `\n\nHuman: ...\n\nAssistant: ...`.
        key: the name of its column, for errors.
        where: the row, for errors.

    Raises:
        BadRecordError: if it is no text, starts otherwise, one side speaks twice in a row, or the
            last turn is not the assistant's.
    """
    if not isinstance(text, str) or _TURN.match(text) is None:
        found = f"the key {key!r} holds {describe(text)}, expected '\\n\\nHuman: ...'"
        raise BadRecordError(where, found, "read other sets with data.sources.base.HubSource")
    _, *pieces = _TURN.split(text)
    names, contents = pieces[::2], pieces[1::2]
    for number, name in enumerate(names):
        if name != ("Human", "Assistant")[number % 2]:
            again = "again " if number else ""
            found = f"turn {number + 1} of {key!r} is {again}from {name!r}"
            raise BadRecordError(where, found, "join the turns, or leave the record out")
    if names[-1] != "Assistant":
        found = f"{key!r} ends with a turn of 'Human', so it has no response"
        raise BadRecordError(where, found, "leave the record out")
    return [
        {"role": SPEAKERS[name], "content": content.strip()}
        for name, content in zip(names, contents, strict=True)
    ]
