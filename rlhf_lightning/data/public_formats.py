r"""Rows of public sets with other keys than ours: read as published, or refused.

| set                          | is known by                                                 |
|------------------------------|-------------------------------------------------------------|
| UltraFeedback, not binarized | `instruction completions`, completions with `overall_score` |
| ShareGPT                     | `conversations`, of `from` and `value`                      |
| Alpaca                       | `instruction output`, perhaps with `input`                  |
| HelpSteer3                   | `context response1 response2 overall_preference`            |
| HelpSteer2, preferences      | `prompt response_1 response_2 preference_strength`          |
| SHP                          | `history human_ref_A human_ref_B labels`                    |
| Nectar                       | `prompt answers`, answers with a `rank`                     |

HH-RLHF has our keys. A tie is a bad record. The best and the worst response to a prompt make the
pair.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlhf_lightning.data.conversations import is_transcript, messages_in, parse_transcript
from rlhf_lightning.data.errors import BadRecordError, Location
from rlhf_lightning.data.files import Row

TEXT_KEYS = ("text", "prompt", "completion", "messages", "chosen", "rejected")
PROMPTS = ("prompt", "instruction", "question", "input", "query")  # names of prompts in other sets
_FIRST_OF_TWO = re.compile(r"(.*(?:response|answer|output|completion|conversation).*?)([aA01])")
_SECOND = {"a": "b", "A": "B", "0": "1", "1": "2"}

_PAIR = 'write each row as {"prompt": %s, "chosen": %s, "rejected": %s}'
_REPLY = '[{"role": "assistant", "content": row["%s"]}]'
_COLUMNS = "read them with columns={%s}"
# Rows with keys of ours that mean something else -> the line that turns them into ours.
_MISNAMED = {
    "instruction input chosen rejected": _PAIR
    % ('row["instruction"] + "\\n\\n" + row["input"]', 'row["chosen"]', 'row["rejected"]'),
    "trajectory chosen rejected": _PAIR
    % ('row["trajectory"]', _REPLY % "chosen", _REPLY % "rejected"),
    "prompt response_a response_b winner_model_a": "leave out ties, and "
    + _PAIR
    % (
        'json.loads(row["prompt"])[0]',
        'json.loads(row["response_" + "ba"[row["winner_model_a"]]])[0]',
        'json.loads(row["response_" + "ab"[row["winner_model_a"]]])[0]',
    ),
    "message_tree_id prompt": _PAIR
    % (
        'row["prompt"]["text"]',
        '(best := sorted(row["prompt"]["replies"], key=lambda r: r["rank"]))[0]["text"]',
        'best[-1]["text"]',
    ),
}
# Rows without keys of ours -> the same.
_OTHERS = {
    "question response_j response_k": _COLUMNS
    % "prompt: question, chosen: response_j, rejected: response_k",
    "instruction chosen_response rejected_response": _COLUMNS
    % "prompt: instruction, chosen: chosen_response, rejected: rejected_response",
    "messages rejected_messages": _COLUMNS
    % "chosen: messages, rejected: rejected_messages, messages: null",
    "chosen_conversations rejected_conversations": _COLUMNS
    % "chosen: chosen_conversations, rejected: rejected_conversations",
    "instruction output text": _COLUMNS % "text: null",
    "conversation": _COLUMNS % "messages: conversation",
    "messages rejected_response": _PAIR
    % ('row["messages"][:-1]', 'row["messages"][-1:]', _REPLY % "rejected_response"),
    "input preferred_output non_preferred_output": _PAIR
    % ('row["input"]["messages"]', 'row["preferred_output"]', 'row["non_preferred_output"]'),
    "info summaries choice": _PAIR
    % (
        'row["info"].get("post") or row["info"]["article"]',
        'row["summaries"][row["choice"]]["text"]',
        'row["summaries"][1 - row["choice"]]["text"]',
    ),
    "context completions": _PAIR
    % (
        'row["context"]',
        '(best := sorted(row["completions"], key=lambda c: c["rank"]))[0]["completion"]',
        'best[-1]["completion"]',
    ),
    "question answers": _PAIR
    % (
        'row["question"]',
        '(worst := sorted(row["answers"], key=lambda a: a["pm_score"]))[-1]["text"]',
        'worst[0]["text"]',
    ),
    "instruction generations ratings": _PAIR
    % (
        'row["instruction"]',
        'row["generations"][row["ratings"].index(max(row["ratings"]))]',
        'row["generations"][row["ratings"].index(min(row["ratings"]))]',
    ),
    "fields responses": _PAIR
    % (
        'row["fields"]["prompt"]',
        'row["fields"][(best := row["responses"]["preference"][0]["value"])]',
        'row["fields"][{"response_a": "response_b", "response_b": "response_a"}[best]]',
    ),
}


def misnamed(row: Row) -> str | None:
    """Return the line for a row whose keys mean something else than ours."""
    whole = next((key for key in ("messages", "conversations") if key in row), None)
    if whole and isinstance(row.get("chosen"), Mapping):  # axolotl, LLaMA-Factory
        return _PAIR % (f"row['{whole}']", "[row['chosen']]", "[row['rejected']]")
    return _line(_MISNAMED, row)


def line_for(row: Row) -> str | None:
    """Return the line that turns a row of another set, or of two responses, into ours."""
    if found := _line(_OTHERS | _MISNAMED, row):
        return found
    for first in filter(None, map(_FIRST_OF_TWO.fullmatch, map(str, row))):
        second = first[1] + _SECOND[first[2]]
        if second in row:
            return _PAIR % ("...", f"the preferred one of {first[0]} and {second}", "the other")
    return None


def _line(table: dict[str, str], row: Row) -> str | None:
    named = {key for key, x in row.items() if x is not None and not (isinstance(x, str) and not x)}
    return next((fix for keys, fix in table.items() if named.issuperset(keys.split())), None)


def as_ours(row: Row, where: Location) -> Row:
    """Return a row of a public set with our keys in place of its own; any other row as it is.

    Raises:
        BadRecordError: for a tie, or a row of such a set that cannot be read.
    """
    for keys, read in _READERS:
        if all(row.get(key) is not None for key in keys):
            try:
                found = read(row, where)
            except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
                if isinstance(error, BadRecordError):
                    raise
                continue  # the same keys with other values: a set of the user's own
            if found is not None:
                return {key: value for key, value in row.items() if key not in keys} | found
    return row


def _pair(prompt: Any, first: Any, second: Any, gap: float, where: Location) -> dict[str, Any]:
    """Return the pair; `gap` is positive if the first response is better, 0 or NaN for a tie."""
    if not abs(gap) > 0:
        fix = "leave ties out with dataset.source.on_bad_record=skip"
        raise BadRecordError(where, "the row is a tie, which prefers neither answer", fix)
    sides = [first, second] if gap > 0 else [second, first]
    if not isinstance(prompt, str):
        sides = [[{"role": "assistant", "content": side}] for side in sides]
    return {"prompt": prompt, "chosen": sides[0], "rejected": sides[1]}


def _best_and_worst(
    prompt: Any, answers: Sequence[Any], text: str, score: Callable[[Any], float], where: Location
) -> dict[str, Any]:
    *_, best = ordered = sorted(answers, key=score)
    return _pair(prompt, best[text], ordered[0][text], score(best) - score(ordered[0]), where)


def _helpsteer3(row: Row, where: Location) -> dict[str, Any]:
    # -3: response1 is much better, 3: response2 is.
    prompt, gap = messages_in(row["context"], "context", where), -float(row["overall_preference"])
    return _pair(prompt, row["response1"], row["response2"], gap, where)


def _helpsteer2(row: Row, where: Location) -> dict[str, Any] | None:
    if "winner" in row or "preferred" in row:  # the strength may have no sign
        return None
    gap = -float(row["preference_strength"])  # as in HelpSteer3
    return _pair(row["prompt"], row["response_1"], row["response_2"], gap, where)


def _shp(row: Row, where: Location) -> dict[str, Any]:
    gap = {1: 1, 0: -1}[int(row["labels"])]  # 1: A is preferred
    return _pair(row["history"], row["human_ref_A"], row["human_ref_B"], gap, where)


def _nectar(row: Row, where: Location) -> dict[str, Any]:
    prompt = row["prompt"]
    if is_transcript(prompt):  # it ends where the response begins
        prompt = parse_transcript(prompt.rstrip() + " ?", "prompt", where)[:-1]
    return _best_and_worst(prompt, row["answers"], "answer", lambda x: -float(x["rank"]), where)


def _ultrafeedback(row: Row, where: Location) -> dict[str, Any]:
    given, score = row["completions"], "overall_score"
    return _best_and_worst(row["instruction"], given, "response", lambda x: float(x[score]), where)


def _sharegpt(row: Row, where: Location) -> dict[str, Any] | None:
    if any(row.get(key) is not None for key in ("messages", "chosen", "rejected")):
        return None
    return {"messages": messages_in(row["conversations"], "conversations", where)}


def _alpaca(row: Row, where: Location) -> dict[str, Any] | None:
    del where
    if not set(row).isdisjoint(TEXT_KEYS):
        return None
    parts = (row["instruction"], row.get("input"))
    told = [part for part in parts if part and part.strip() not in ("", "<noinput>")]
    return {"prompt": "\n\n".join(told), "completion": row["output"], "input": None}


_READERS: tuple[tuple[tuple[str, ...], Callable[[Row, Location], Any]], ...] = (
    (("context", "response1", "response2", "overall_preference"), _helpsteer3),
    (("prompt", "response_1", "response_2", "preference_strength"), _helpsteer2),
    (("history", "human_ref_A", "human_ref_B", "labels"), _shp),
    (("prompt", "answers"), _nectar),
    (("instruction", "completions"), _ultrafeedback),
    (("conversations",), _sharegpt),
    (("instruction", "output"), _alpaca),
)
