"""Conversations that templates of the field write, refuse or cut: the columns of a table."""

from __future__ import annotations

from typing import Any


def said(role: str, content: str, **more: Any) -> dict[str, Any]:
    """Return a message."""
    return {"role": role, "content": content, **more}


def call(name: str, arguments: dict[str, Any], number: int = 1) -> dict[str, Any]:
    """Return the call of a tool."""
    function = {"name": name, "arguments": arguments}
    return {"type": "function", "id": f"call0000{number}", "function": function}


WEATHER = call("weather", {"town": "Ulm", "days": 3})
CLOCK = call("clock", {"zone": {"name": "CET"}}, 2)
TOWN = {"type": "string", "description": "Name of the town"}
SCHEMA = {"type": "object", "properties": {"town": TOWN}, "required": ["town"]}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "Weather of it", "parameters": SCHEMA},
    }
]
SUM = said("user", "2+2?")
RESULT = said("tool", "12 degrees", name="weather", tool_call_id="call00001")
NOON = said("tool", "noon", name="clock", tool_call_id="call00002")
CODE = 'x = 1\n\n\ny = 2\n\t<b>"&"</b>'
OLD = said("assistant", "<think>\nold thought\n</think>\n\n4")
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": [said("user", "What is tea?"), said("assistant", "A drink.")],
    "system": [said("system", "Be brief."), SUM, said("assistant", "4")],
    "turns": [SUM, said("assistant", "4"), said("user", "And?"), said("assistant", "Good.")],
    "space": [said("user", "  What?\n"), said("assistant", "\n Yes. \n")],
    "same": [said(role, "yes") for role in ("user", "assistant") * 2],
    "short": [said("user", "a"), said("assistant", "user")],
    "lines": [said("user", CODE), said("assistant", '{"a": [1, 2]}\n\n```py\nprint(1)\n```')],
    "unicode": [said("user", "Größe? 漢字 🙂"), said("assistant", "naïve ﬁ")],
    "marks": [said("user", "write [INST] and <|user|>"), said("assistant", "<b>ok</b> {{ x }}")],
    "think": [SUM, said("assistant", "<think>\nsum is four\n</think>\n\n4")],
    "think_tight": [SUM, said("assistant", "<think>sum is four</think>4")],
    "thoughts": [SUM, OLD, SUM, said("assistant", "<think>\nnew thought\n</think>\n\n6")],
    "old_thought": [SUM, OLD, SUM, said("assistant", "6")],
    "reasoning": [SUM, said("assistant", "4", reasoning_content="sum is four")],
    "reasonings": [
        SUM,
        said("assistant", "4", reasoning_content="old thought"),
        SUM,
        said("assistant", "6", reasoning_content="new thought"),
    ],
    "call": [SUM, said("assistant", "", tool_calls=[WEATHER]), RESULT, said("assistant", "Warm.")],
    "calls": [
        SUM,
        said("assistant", "", tool_calls=[WEATHER, CLOCK]),
        RESULT,
        NOON,
        said("assistant", "Warm."),
    ],
    "call_last": [SUM, said("assistant", "", tool_calls=[WEATHER])],
    "result": [SUM, said("assistant", "[call]"), RESULT, said("assistant", "Warm.")],
    "middle": [
        SUM,
        said("assistant", "4"),
        said("system", "Answer in French."),
        SUM,
        said("assistant", "quatre"),
    ],
    "two_users": [SUM, said("user", "Be brief."), said("assistant", "4")],
    "tools": [SUM, said("assistant", "Which town?")],
}
