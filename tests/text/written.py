"""What transformers itself writes of a conversation: no code of the package takes part.

A template is given the conversation in each form that templates of the field want: content as text
or as parts, a thought under one of three keys, arguments of calls as objects or as JSON.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

THOUGHTS = ("reasoning_content", "reasoning", "thinking")


def letter(tokenizer: Any, messages: list[dict[str, Any]], tools: Any) -> str:
    """Return R where every form is refused, "." where one is written in whole, else L."""
    texts = []
    for shaped in _forms(messages):
        try:
            texts.append(tokenizer.apply_chat_template(shaped, tokenize=False, tools=tools))
        except Exception:  # whatever a template raises
            continue
    if not texts:
        return "R"
    return "." if any(_is_whole(text, messages, tools) for text in texts) else "L"


def _forms(messages: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    for parts, thought, spelled in itertools.product((False, True), THOUGHTS, (False, True)):
        shaped = json.loads(json.dumps(messages))
        for message in shaped:
            if "reasoning_content" in message:
                message[thought] = message.pop("reasoning_content")
            if parts:
                message["content"] = [{"type": "text", "text": message["content"]}]
            for call in message.get("tool_calls", ()) if spelled else ():
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
        yield shaped


def _is_whole(text: str, messages: list[dict[str, Any]], tools: Any) -> bool:
    """Look for contents, the last thought, and names and arguments of calls, in order."""
    if "'type': 'text'" in text:  # the list itself
        return False
    at = 0
    for number, message in enumerate(messages):
        is_last = number == len(messages) - 1
        thought, _, content = message["content"].strip().rpartition("</think>")
        thought = message.get("reasoning_content") or thought.removeprefix("<think>").strip()
        said = [thought] * is_last + [content.strip()]
        start = 0 if message["role"] == "system" else at  # templates move it
        end = start
        for piece in filter(None, said):
            end = _find(piece, text, end) + len(piece)
            if end < len(piece):
                return False
        for call in message.get("tool_calls", ()):
            pieces = (call["function"]["name"], *_leaves(call["function"]["arguments"]))
            if any(_find(piece, text, start) < 0 for piece in pieces):
                return False
        at = max(at, end) if message["role"] != "system" else at
    schema = ("weather", "Weather of it", "Name of the town") if tools else ()
    return all(piece in text for piece in schema)


def _find(piece: str, text: str, start: int) -> int:
    spelled = (piece, json.dumps(piece)[1:-1], json.dumps(piece, ensure_ascii=False)[1:-1])
    return next((at for each in spelled if (at := text.find(each, start)) >= 0), -1)


def _leaves(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for each in value.values():
            yield from _leaves(each)
    else:
        yield str(value)
