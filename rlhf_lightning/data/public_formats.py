r"""Rows of public sets that have other keys, as rows with ours: one function a set.

| set                              | is known by                                                  |
|----------------------------------|--------------------------------------------------------------|
| HelpSteer3                       | `context response1 response2 overall_preference`             |
| HelpSteer2, preferences          | `prompt response_1 response_2 preference_strength`           |
| Summaries compared by OpenAI     | `info summaries choice`                                      |
| SHP                              | `history human_ref_A human_ref_B labels`                     |
| Chatbot Arena, as rows           | `prompt response_a response_b winner_model_a winner_model_b` |
| Chatbot Arena, as conversations  | `conversation_a conversation_b winner`                       |
| Nectar                           | `prompt answers`, answers with a `rank`                      |
| UltraFeedback, not binarized     | `instruction completions`, completions with `overall_score`  |
| WebGPT comparisons               | `question answer_0 answer_1 score_0 score_1`                 |
| PKU-SafeRLHF                     | `prompt response_0 response_1 better_response_id`            |
| Stack Exchange pairs             | `question response_j response_k`                             |
| Stack Exchange preferences       | `question answers`, answers with a `pm_score`                |
| UltraFeedback of Argilla         | `instruction chosen_response rejected_response`              |
| OpenAssistant trees              | `prompt` with `replies`                                      |
| OpenAI's preferences             | `input preferred_output non_preferred_output`                |
| UltraInteract                    | `trajectory chosen rejected`                                 |
| Orca pairs and the like          | `chosen rejected`, with the prompt as `question`, ...        |
| axolotl                          | `messages chosen rejected`, a side being one message         |
| ShareGPT                         | `conversations`, with `chosen rejected` for pairs            |
| Capybara; WildChat               | `conversation`, of `input output`; of messages               |
| Alpaca; Dolly                    | `instruction output`; `instruction response`                 |
| HelpSteer and HelpSteer2         | `prompt response helpfulness`                                |

A tie is a bad record. The best and the worst response to a prompt make the pair.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlhf_lightning.data.cells import messages_in
from rlhf_lightning.data.conversations import is_transcript, num_shared, parse_transcript
from rlhf_lightning.data.errors import BadRecordError, Location, describe
from rlhf_lightning.data.files import Row

PROMPTS = ("prompt", "instruction", "question", "input", "query")
TEXT_KEYS = ("text", "prompt", "completion", "messages", "chosen", "rejected")
_NO_INPUT = ("", "<noinput>")  # the latter is in the first Alpaca-like sets
Reader = Callable[[Row, Location], dict[str, Any] | None]
# Keys of sets that no row of which is a record alone -> what to do.
HINTS: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("message_id", "role"),
        "its rows are single messages: give the set's file of trees (NAME.trees.jsonl.gz)",
    ),
    (("instruction", "output", "text"), "read instruction and output with columns={text: null}"),
    (
        ("completions", "labels"),
        "its rows label the steps of a response: join the steps of rows whose labels are all true",
    ),
    (
        ("messages", "rejected_response"),
        'write each row as {"prompt": row["messages"][:-1], "chosen": row["messages"][-1:], '
        '"rejected": [{"role": "assistant", "content": row["rejected_response"]}]}',
    ),
    (
        ("messages", "rejected_messages"),
        "read them with columns={chosen: messages, rejected: rejected_messages, messages: null}",
    ),
    (
        ("chosen_conversations", "rejected_conversations"),
        "read them with columns={chosen: chosen_conversations, rejected: rejected_conversations}",
    ),
    (
        ("context", "completions"),
        'write each row as {"prompt": row["context"], **{side: best(row["completions"], key=lambda '
        'c: c["rank"])["completion"] for side, best in (("chosen", min), ("rejected", max))}}',
    ),
    (
        ("instruction", "generations", "ratings"),
        'write each row as {"prompt": row["instruction"], **{side: row["generations"]['
        'row["ratings"].index(best(row["ratings"]))] for side, best in (("chosen", max), '
        '("rejected", min))}}',
    ),
    (
        ("fields", "responses"),
        'write each row, with the names of your set for "prompt", "response_a", "response_b" and '
        '"preference", as {"prompt": row["fields"]["prompt"], "chosen": row["fields"][(best := '
        'row["responses"]["preference"][0]["value"])], "rejected": row["fields"][{"response_a": '
        '"response_b", "response_b": "response_a"}[best]]}',
    ),
    (("info", "summary"), "its rows rate single summaries: give the set's comparisons"),
    (
        ("response", "helpfulness"),
        "its rows rate single responses: write the better and the worse one of each prompt as "
        "chosen and rejected",
    ),
)


def as_ours(row: Row, where: Location) -> Row:
    """Return a row of a public set with our keys beside its own; any other row as it is.

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
            messages: Any = row.get("messages")
            messages = messages.tolist() if hasattr(messages, "tolist") else messages
            given = isinstance(messages, list | tuple) and len(messages) > 0
            if found is not None and not ("messages" in found and given):
                return {key: value for key, value in row.items() if key not in keys} | found
    return row


def with_roles(messages: Any) -> Any:
    """Return messages of `from` and `value` as ones of `role` and `content`; others as they are."""
    if not isinstance(messages, list | tuple):
        return messages
    renamed = {"from": "role", "value": "content"}
    found = []
    for message in messages:
        if isinstance(message, Mapping) and renamed.keys() <= message.keys():
            ours = {key: message.get(key) for key in renamed.values()}
            if any(value is None for value in ours.values()):
                given = {our: message[key] for key, our in renamed.items() if ours[our] is None}
                message = {k: v for k, v in message.items() if k not in renamed} | given
        found.append(message)
    return found


def _pair(prompt: Any, first: Any, second: Any, gap: float, where: Location) -> dict[str, Any]:
    """Return the pair; `gap` is positive if the first response is better.

    Raises:
        BadRecordError: if it is 0, or no number.
    """
    if not abs(gap) > 0:
        fix = "leave ties out with dataset.source.on_bad_record=skip"
        raise BadRecordError(where, "the row is a tie, which prefers neither answer", fix)
    chosen, rejected = (first, second) if gap > 0 else (second, first)
    if not isinstance(prompt, str):
        chosen, rejected = _said(chosen), _said(rejected)
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def _said(answer: Any) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": answer}]


def _turn(question: Any, answer: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": question}, *_said(answer)]


def _best_and_worst(
    prompt: Any, answers: Sequence[Any], text: str, score: Callable[[Any], float], where: Location
) -> dict[str, Any]:
    ordered = sorted((each for each in answers if not math.isnan(score(each))), key=score)
    best, worst = ordered[-1], ordered[0]
    return _pair(prompt, best[text], worst[text], score(best) - score(worst), where)


def _helpsteer3(row: Row, where: Location) -> dict[str, Any]:
    prompt = with_roles(messages_in(row["context"], "context", where))
    # -3: response1 is much better, 3: response2 is.
    gap = -float(row["overall_preference"])
    return _pair(prompt, row["response1"], row["response2"], gap, where)


def _helpsteer2(row: Row, where: Location) -> dict[str, Any] | None:
    if "winner" in row or "preferred" in row:  # the strength may have no sign
        return None
    gap = -float(row["preference_strength"])  # as in HelpSteer3
    return _pair(row["prompt"], row["response_1"], row["response_2"], gap, where)


def _summaries(row: Row, where: Location) -> dict[str, Any]:
    info = row["info"]
    first, second = (summary["text"] for summary in row["summaries"])
    if info.get("post"):
        prompt = f"SUBREDDIT: r/{info['subreddit']}\n\nTITLE: {info['title']}\n\nPOST: "
        prompt += f"{info['post']}\n\nTL;DR:"
    else:  # news of CNN and the Daily Mail
        prompt = f"Article:\n{info['article']}\n\nTL;DR:"
    gap = {0: 1, 1: -1}[row["choice"]]
    return _pair(prompt, first, second, gap, where)


def _argilla(row: Row, where: Location) -> dict[str, Any]:
    return _pair(row["instruction"], row["chosen_response"], row["rejected_response"], 1, where)


def _shp(row: Row, where: Location) -> dict[str, Any]:
    gap = {1: 1, 0: -1}[int(row["labels"])]  # 1: A is preferred
    return _pair(row["history"], row["human_ref_A"], row["human_ref_B"], gap, where)


def _arena(row: Row, where: Location) -> dict[str, Any]:
    turns, *answers = (_listed(row[key]) for key in ("prompt", "response_a", "response_b"))
    first, second = (
        [x for turn in zip(turns, said, strict=True) for x in _turn(*turn)] for said in answers
    )
    gap = int(row["winner_model_a"]) - int(row["winner_model_b"])
    return _pair_of_conversations(first, second, gap, where)


def _listed(value: Any) -> list[str]:
    found = json.loads(value) if isinstance(value, str) and value.startswith("[") else value
    return list(found) if isinstance(found, list | tuple) else [found]


_WINNERS, _NO_WINNER = {"model_a": 1, "model_b": -1}, ("tie", "both", "neither")


def _arena_conversations(row: Row, where: Location) -> dict[str, Any]:
    names = ("conversation_a", "conversation_b")
    first, second = (with_roles(messages_in(row[key], key, where)) for key in names)
    winner = str(row["winner"])
    if winner not in _WINNERS and not any(word in winner for word in _NO_WINNER):
        found = f"the key 'winner' holds {describe(row['winner'])}, which names no winner"
        raise BadRecordError(where, found, "write model_a or model_b, or tie where neither is one")
    return _pair_of_conversations(first, second, _WINNERS.get(winner, 0), where)


def _pair_of_conversations(
    first: list[Any], second: list[Any], gap: float, where: Location
) -> dict[str, Any]:
    if not len(first) - 1 == len(second) - 1 == num_shared(first[:-1], second[:-1]):
        found = "the two answers end different conversations"
        fix = "leave such rows out with dataset.source.on_bad_record=skip"
        raise BadRecordError(where, found, fix)
    return _pair(first[:-1], first[-1]["content"], second[-1]["content"], gap, where)


def _nectar(row: Row, where: Location) -> dict[str, Any]:
    prompt = row["prompt"]
    if is_transcript(prompt):
        # The prompt ends where the response begins.
        whole = prompt.rstrip() + " ?"
        prompt = parse_transcript(whole, "prompt", where)[:-1]
    return _best_and_worst(prompt, row["answers"], "answer", lambda x: -float(x["rank"]), where)


def _ultrafeedback(row: Row, where: Location) -> dict[str, Any]:
    given, score = row["completions"], "overall_score"
    return _best_and_worst(row["instruction"], given, "response", lambda x: float(x[score]), where)


def _webgpt(row: Row, where: Location) -> dict[str, Any]:
    question = row["question"]
    prompt = question["full_text"] if isinstance(question, Mapping) else question
    gap = float(row["score_0"]) - float(row["score_1"])
    return _pair(prompt, row["answer_0"], row["answer_1"], gap, where)


def _safe_rlhf(row: Row, where: Location) -> dict[str, Any]:
    gap = {0: 1, 1: -1}[int(row["better_response_id"])]
    return _pair(row["prompt"], row["response_0"], row["response_1"], gap, where)


def _stack_exchange(row: Row, where: Location) -> dict[str, Any]:
    return _pair(row["question"], row["response_j"], row["response_k"], 1, where)


def _stack_exchange_responses(row: Row, where: Location) -> dict[str, Any]:
    given, score = row["answers"], "pm_score"
    return _best_and_worst(row["question"], given, "text", lambda x: float(x[score]), where)


def _openai(row: Row, where: Location) -> dict[str, Any]:
    sides = {"chosen": row["preferred_output"], "rejected": row["non_preferred_output"]}
    return {"prompt": row["input"]["messages"], "tools": row["input"].get("tools"), **sides}


def _oasst_tree(row: Row, where: Location) -> dict[str, Any]:
    root = row["prompt"]
    prompt = [{"role": "user", "content": root["text"]}]
    ranked = [reply for reply in root["replies"] if reply.get("rank") is not None]
    if len(ranked) < 2:
        found = "the tree has fewer than two ranked replies to its prompt"
        fix = "leave such trees out with dataset.source.on_bad_record=skip"
        raise BadRecordError(where, found, fix)
    return _best_and_worst(prompt, ranked, "text", lambda x: -float(x["rank"]), where)


def _pair_with_prompt(row: Row, where: Location) -> dict[str, Any] | None:
    sides = {key: row[key] for key in ("chosen", "rejected")}
    name = next((key for key in PROMPTS if isinstance(row.get(key), str)), None)
    plain = all(isinstance(side, str) and not is_transcript(side) for side in sides.values())
    if not plain or name is None or row.get("prompt") is not None:
        return None
    if name == "instruction" and isinstance(row.get("input"), str):  # LLaMA-Factory's Alpaca
        parts = ("instruction", "input")
        return {"prompt": _joined(*map(row.get, parts)), **dict.fromkeys(parts), **sides}
    return {"prompt": row[name], **sides}


def _ultrainteract(row: Row, where: Location) -> dict[str, Any] | None:
    prompt = with_roles(row["trajectory"])
    plain = isinstance(prompt, list) and isinstance(row["chosen"], str)
    return _pair(prompt, row["chosen"], row["rejected"], 1, where) if plain else None


def _sharegpt(row: Row, where: Location) -> dict[str, Any]:
    turns = with_roles(messages_in(row["conversations"], "conversations", where))
    sides = {key: row[key] for key in ("chosen", "rejected") if row.get(key) is not None}
    if len(sides) < 2:
        return {"messages": turns}
    return {"prompt": turns} | {key: with_roles([side]) for key, side in sides.items()}


def _one_message_a_side(row: Row, where: Location) -> dict[str, Any] | None:
    if not all(isinstance(row[side], Mapping) for side in ("chosen", "rejected")):
        return None
    return _sharegpt({**row, "conversations": row["messages"]}, where)


def _capybara(row: Row, where: Location) -> dict[str, Any]:
    turns = messages_in(row["conversation"], "conversation", where)
    if all("role" in turn for turn in turns):
        return {"messages": turns}
    return {"messages": [x for turn in turns for x in _turn(turn["input"], turn["output"])]}


def _joined(*given: Any) -> str:
    parts = (part for part in given if part and part == part)  # NaN is no part
    return "\n\n".join(part for part in parts if part.strip() not in _NO_INPUT)


def _instruction(answer: str, *more: str) -> Reader:
    def read(row: Row, where: Location) -> dict[str, Any] | None:
        if not set(row).isdisjoint(TEXT_KEYS):
            return None
        prompt = _joined(row["instruction"], *(row.get(key) for key in more))
        return {"prompt": prompt, "completion": row[answer]} | dict.fromkeys(more)

    return read


def _helpsteer(row: Row, where: Location) -> dict[str, Any]:
    # The own keys stay: as prompts the rows are asked for them by rewards.
    own = {key: row[key] for key in ("prompt", "response", "helpfulness")}
    return own | {"completion": row["response"]}


_READERS: tuple[tuple[tuple[str, ...], Reader], ...] = (
    (("context", "response1", "response2", "overall_preference"), _helpsteer3),
    (("prompt", "response_1", "response_2", "preference_strength"), _helpsteer2),
    (("info", "summaries", "choice"), _summaries),
    (("instruction", "chosen_response", "rejected_response"), _argilla),
    (("history", "human_ref_A", "human_ref_B", "labels"), _shp),
    (("prompt", "response_a", "response_b", "winner_model_a", "winner_model_b"), _arena),
    (("conversation_a", "conversation_b", "winner"), _arena_conversations),
    (("prompt", "answers"), _nectar),
    (("instruction", "completions"), _ultrafeedback),
    (("question", "answer_0", "answer_1", "score_0", "score_1"), _webgpt),
    (("prompt", "response_0", "response_1", "better_response_id"), _safe_rlhf),
    (("question", "response_j", "response_k"), _stack_exchange),
    (("question", "answers"), _stack_exchange_responses),
    (("input", "preferred_output", "non_preferred_output"), _openai),
    (("prompt",), _oasst_tree),
    (("trajectory", "chosen", "rejected"), _ultrainteract),
    (("messages", "chosen", "rejected"), _one_message_a_side),
    (("chosen", "rejected"), _pair_with_prompt),
    (("conversations",), _sharegpt),
    (("conversation",), _capybara),
    (("instruction", "output"), _instruction("output", "input")),
    (("instruction", "response"), _instruction("response", "context")),
    (("prompt", "response", "helpfulness"), _helpsteer),
)
