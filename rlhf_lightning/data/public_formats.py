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

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlhf_lightning.data.files import Row
from rlhf_lightning.data.texts import is_transcript, messages_in, parse_transcript
from rlhf_lightning.text.messages import BadValueError

TEXT_KEYS = ("text", "prompt", "completion", "messages", "chosen", "rejected")
PROMPTS = ("prompt", "instruction", "question", "input", "query")  # names of prompts in other sets
PAIR = 'write each row as {"prompt": %s, "chosen": %s, "rejected": %s}'
# Keys of ours that mean something else where these keys are in a row.
_MISNAMED = ("instruction input chosen rejected", "trajectory chosen rejected",
             "prompt response_a response_b winner_model_a", "message_tree_id prompt")  # fmt: skip
_COLUMNS = {
    "instruction output text": "text: null",
    "messages rejected_messages": "chosen: messages, rejected: rejected_messages, messages: null",
}
_OTHER_NAMES = {  # of columns that are read only where they are mapped
    "prompt": (*PROMPTS, "problem", "user", "human", "source"),
    "completion": ("answer", "response", "output", "solution", "assistant", "gpt", "target"),
    "messages": ("conversation",),
    "chosen": ("response_j", "chosen_response", "chosen_conversations"),
    "rejected": ("response_k", "rejected_response", "rejected_conversations"),
}


def misnamed(row: Row) -> str | None:
    """Return the line for a row whose keys mean something else than ours."""
    whole = next((key for key in ("messages", "conversations") if key in row), None)
    if whole and isinstance(row.get("chosen"), Mapping):  # axolotl, LLaMA-Factory
        return PAIR % (f"row['{whole}']", "[row['chosen']]", "[row['rejected']]")
    return pair_of(row) if any(_has(row, keys) for keys in _MISNAMED) else None


def pair_of(row: Row) -> str:
    """Return the line that turns rows with these keys into pairs."""
    return PAIR % ("...", "the preferred response", "the other one") + f" of {names_in(row)}"


def mapping_of(row: Row) -> str:
    """Return how columns are mapped, with the row's own names where they say what they are."""
    named = next((columns for keys, columns in _COLUMNS.items() if _has(row, keys)), "")
    for ours, names in _OTHER_NAMES.items() if not named else ():
        theirs = next((name for name in row if str(name).lower() in names), None)
        named += f", {ours}: {theirs}" if theirs else ""
    return f"columns={{{named.lstrip(', ') or 'ours: theirs'}}}"


def names_in(row: Row) -> str:
    """Return the keys of a row, and those of the objects that its values hold."""
    shown = []
    for name, value in row.items():
        first = value[0] if isinstance(value, list | tuple) and value else value
        inner = [str(key) for key in first][:6] if isinstance(first, Mapping) else ()
        shown.append(f"{name} ({', '.join(inner)})" if inner else str(name))
    return ", ".join(shown[:12] + ["..."] * (len(shown) > 12)) or "no keys"


def _has(row: Row, keys: str) -> bool:
    values = [row.get(key) for key in keys.split()]
    return not any(value is None or (isinstance(value, str) and not value) for value in values)


def as_ours(row: Row) -> Row:
    """Return a row of a public set with our keys in place of its own; any other row as it is.

    Raises:
        BadValueError: for a tie, or a row of such a set that cannot be read.
    """
    for keys, read in _READERS:
        if all(row.get(key) is not None for key in keys):
            try:
                found = read(row)
            except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
                if isinstance(error, BadValueError):
                    raise
                continue  # the same keys with other values: a set of the user's own
            if found is not None:
                return {key: value for key, value in row.items() if key not in keys} | found
    return row


def _pair(prompt: Any, first: Any, second: Any, gap: float) -> dict[str, Any]:
    """Return the pair; `gap` is positive if the first response is better, 0 or NaN for a tie."""
    if not abs(gap) > 0:
        fix = "leave ties out with dataset.source.on_bad_record=skip"
        raise BadValueError("the row is a tie, which prefers neither answer", fix)
    sides = [first, second] if gap > 0 else [second, first]
    if not isinstance(prompt, str):
        sides = [[{"role": "assistant", "content": side}] for side in sides]
    return {"prompt": prompt, "chosen": sides[0], "rejected": sides[1]}


def _best_and_worst(
    prompt: Any, answers: Sequence[Any], text: str, score: Callable[[Any], float]
) -> dict[str, Any]:
    *_, best = ordered = sorted(answers, key=score)
    return _pair(prompt, best[text], ordered[0][text], score(best) - score(ordered[0]))


def _helpsteer3(row: Row) -> dict[str, Any]:
    # -3: response1 is much better, 3: response2 is.
    prompt, gap = messages_in(row["context"], "context"), -float(row["overall_preference"])
    return _pair(prompt, row["response1"], row["response2"], gap)


def _helpsteer2(row: Row) -> dict[str, Any] | None:
    if "winner" in row or "preferred" in row:  # the strength may have no sign
        return None
    gap = -float(row["preference_strength"])  # as in HelpSteer3
    return _pair(row["prompt"], row["response_1"], row["response_2"], gap)


def _shp(row: Row) -> dict[str, Any]:
    gap = {1: 1, 0: -1}[int(row["labels"])]  # 1: A is preferred
    return _pair(row["history"], row["human_ref_A"], row["human_ref_B"], gap)


def _nectar(row: Row) -> dict[str, Any]:
    prompt = row["prompt"]
    if is_transcript(prompt):  # it ends where the response begins
        prompt = parse_transcript(prompt.rstrip() + " ?", "prompt")[:-1]
    return _best_and_worst(prompt, row["answers"], "answer", lambda x: -float(x["rank"]))


def _ultrafeedback(row: Row) -> dict[str, Any]:
    given, score = row["completions"], "overall_score"
    return _best_and_worst(row["instruction"], given, "response", lambda x: float(x[score]))


def _sharegpt(row: Row) -> dict[str, Any] | None:
    if any(row.get(key) is not None for key in ("messages", "chosen", "rejected")):
        return None
    return {"messages": messages_in(row["conversations"], "conversations")}


def _alpaca(row: Row) -> dict[str, Any] | None:
    if not set(row).isdisjoint(TEXT_KEYS):
        return None
    parts = (row["instruction"], row.get("input"))
    told = [part for part in parts if part and part.strip() not in ("", "<noinput>")]
    return {"prompt": "\n\n".join(told), "completion": row["output"], "input": None}


_READERS: tuple[tuple[tuple[str, ...], Callable[[Row], Any]], ...] = (
    (("context", "response1", "response2", "overall_preference"), _helpsteer3),
    (("prompt", "response_1", "response_2", "preference_strength"), _helpsteer2),
    (("history", "human_ref_A", "human_ref_B", "labels"), _shp),
    (("prompt", "answers"), _nectar),
    (("instruction", "completions"), _ultrafeedback),
    (("conversations",), _sharegpt),
    (("instruction", "output"), _alpaca),
)
