"""Rows of public sets, as they are published, with invented texts."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from rlhf_lightning.data.errors import BadRecordError
from rlhf_lightning.data.records import DemonstrationRecord, PreferenceRecord
from rlhf_lightning.data.sources.given import GivenRows

Q, GOOD, BAD = "How does one look after tea?", "Keep it dry.", "Ask somebody else."
TIE = "on_bad_record=skip"


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def parts(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": [{"type": "text", "text": text, "image": None}]}


PLAIN = PreferenceRecord(Q, GOOD, BAD)
CHAT = PreferenceRecord((user(Q),), (said(GOOD),), (said(BAD),))
ARENA = {
    "prompt": json.dumps([Q]),
    "response_a": json.dumps([BAD]),
    "response_b": json.dumps([GOOD]),
}
NO = {"winner_model_a": 0, "winner_model_b": 0, "winner_tie": 0}
TREE = {"text": Q, "role": "prompter", "message_id": "m"}
TLDR = {
    "info": {"id": "t3", "post": "It is wet.", "title": "Tea", "subreddit": "tea", "site": None}
}
UF = {"source": "x", "models": ["a", "b", "c"], "instruction": Q}
PAIRS: dict[str, tuple[dict[str, Any], PreferenceRecord]] = {
    "HelpSteer3": (
        {"context": [user(Q)], "response1": BAD, "response2": GOOD, "overall_preference": 2}, CHAT),
    "HelpSteer3, first": (
        {"context": [user(Q)], "response1": GOOD, "response2": BAD, "overall_preference": -1},
        CHAT),
    "SHP": ({"history": Q, "human_ref_A": GOOD, "human_ref_B": BAD, "labels": 1}, PLAIN),
    "SHP, B": ({"history": Q, "human_ref_A": BAD, "human_ref_B": GOOD, "labels": 0}, PLAIN),
    "Arena": ({**ARENA, **NO, "winner_model_b": 1}, CHAT),
    "Arena, conversations": (
        {"conversation_a": [user(Q), said(GOOD)], "conversation_b": [user(Q), said(BAD)],
         "winner": "model_a"}, CHAT),
    "Nectar": (
        {"prompt": f"\n\nHuman: {Q}\n\nAssistant: ", "turns": 1, "answers": [
            {"answer": "Or so.", "rank": 2.0}, {"answer": BAD, "rank": 7.0},
            {"answer": GOOD, "rank": 1.0}]}, CHAT),
    "UltraFeedback": (
        {**UF, "completions": [{"response": BAD, "overall_score": 2.5},
                               {"response": GOOD, "overall_score": 9}]}, PLAIN),
    "WebGPT": (
        {"question": {"full_text": Q, "id": "1"}, "answer_0": BAD, "answer_1": GOOD,
         "score_0": -0.5, "score_1": 0.5, "quotes_0": {}}, PLAIN),
    "PKU-SafeRLHF": (
        {"prompt": Q, "response_0": BAD, "response_1": GOOD, "better_response_id": 1,
         "safer_response_id": 0}, PLAIN),
    "Stack Exchange": (
        {"qid": 1, "question": Q, "response_j": GOOD, "response_k": BAD}, PLAIN),
    "Nectar, several turns": (
        {"prompt": f"\n\nHuman: {Q}\n\nAssistant: {BAD}\n\nHuman: And?\n\nAssistant:",
         "answers": [{"answer": GOOD, "rank": 1}, {"answer": "No.", "rank": 2}]},
        PreferenceRecord((user(Q), said(BAD), user("And?")), (said(GOOD),), (said("No."),))),
    "OpenAssistant tree": (
        {"message_tree_id": "t", "prompt": {**TREE, "replies": [
            {"text": BAD, "role": "assistant", "rank": 1, "replies": []},
            {"text": GOOD, "role": "assistant", "rank": 0, "replies": []},
            {"text": "?", "role": "assistant", "rank": None, "replies": []}]}}, CHAT),
    "HelpSteer2, preferences": (
        {"split": "train", "prompt": Q, "response_1": BAD, "response_2": GOOD,
         "preference_strength": 2, "preference_statement": "@Response 2 is drier."}, PLAIN),
    "HelpSteer2, first": (
        {"prompt": Q, "response_1": GOOD, "response_2": BAD, "preference_strength": -1}, PLAIN),
    "OpenAI's summaries": (
        {**TLDR, "summaries": [{"text": BAD, "policy": "sup1"}, {"text": GOOD, "policy": "ref"}],
         "choice": 1, "worker": "w", "extra": {"confidence": None}},
        PreferenceRecord(
            "SUBREDDIT: r/tea\n\nTITLE: Tea\n\nPOST: It is wet.\n\nTL;DR:", GOOD, BAD)),
    "OpenAI's summaries of news": (
        {"info": {"id": "1", "post": None, "title": None, "article": "It rained."},
         "summaries": [{"text": GOOD}, {"text": BAD}], "choice": 0},
        PreferenceRecord("Article:\nIt rained.\n\nTL;DR:", GOOD, BAD)),
    "Stack Exchange preferences": (
        {"qid": 4, "question": Q, "answers": [
            {"answer_id": 7, "pm_score": 1, "selected": False, "text": BAD},
            {"answer_id": 8, "pm_score": 7, "selected": True, "text": GOOD},
            {"answer_id": 9, "pm_score": float("nan"), "text": "?"}], "date": "2012/01/01"}, PLAIN),
    "UltraFeedback of Argilla": (
        {"instruction": Q, "chosen_response": GOOD, "rejected_response": BAD,
         "chosen_avg_rating": 4.5, "rejected_avg_rating": 2.0}, PLAIN),
    "UltraInteract": (
        {"task": "Math", "trajectory": [{"from": "user", "value": Q}], "chosen": GOOD,
         "rejected": BAD, "parent_id": "0"}, CHAT),
    "Capybara pairs": (
        {"conversation": [{"input": Q, "output": "?"}], "chosen": [user(Q), said(GOOD)],
         "rejected": [user(Q), said(BAD)], "rating_chosen": 5, "rating_rejected": 2}, CHAT),
    "Arena of 140,000": (
        {"conversation_a": [parts("user", Q), parts("assistant", BAD)], "winner": "model_b",
         "conversation_b": [parts("user", Q), parts("assistant", GOOD)]}, CHAT),
    "Orca": ({"system": "", "question": Q, "chosen": GOOD, "rejected": BAD}, PLAIN),
    "OpenAI": (
        {"input": {"messages": [user(Q)], "tools": [], "parallel_tool_calls": True},
         "preferred_output": [said(GOOD)], "non_preferred_output": [said(BAD)]}, CHAT),
    "LLaMA-Factory's Alpaca": (
        {"instruction": "Sum up.", "input": Q, "chosen": GOOD, "rejected": BAD},
        PreferenceRecord(f"Sum up.\n\n{Q}", GOOD, BAD)),
    "LLaMA-Factory's Alpaca without input": (
        {"instruction": Q, "input": "", "chosen": GOOD, "rejected": BAD}, PLAIN),
    "Distilabel": ({"input": Q, "chosen": GOOD, "rejected": BAD}, PLAIN),
    "ShareGPT pairs": (
        {"conversations": [{"from": "human", "value": Q}], "chosen": {"from": "gpt", "value": GOOD},
         "rejected": {"from": "gpt", "value": BAD}}, CHAT),
    "ORPO, prompt with white space": (
        {"prompt": f" {Q}\n", "chosen": [user(Q), said(GOOD)], "rejected": [user(Q), said(BAD)]},
        CHAT),
}  # fmt: skip
TWO = (user(Q), said(BAD), user("And?"))
DEMONSTRATIONS: dict[str, tuple[dict[str, Any], DemonstrationRecord]] = {
    "ShareGPT": (
        {"id": "s", "conversations": [{"from": "human", "value": Q}, {"from": "gpt", "value": BAD},
                                      {"from": "human", "value": "And?"},
                                      {"from": "gpt", "value": GOOD}]},
        DemonstrationRecord(TWO, (said(GOOD),))),
    "conversations with roles": (
        {"conversations": [*TWO, said(GOOD)]}, DemonstrationRecord(TWO, (said(GOOD),))),
    "ShareGPT in a cell": (
        {"conversations": str([{"from": "human", "value": Q}, {"from": "gpt", "value": GOOD}])},
        DemonstrationRecord((user(Q),), (said(GOOD),))),
    "messages of from and value": (
        {"messages": [{"from": "human", "value": Q}, {"from": "gpt", "value": GOOD}]},
        DemonstrationRecord((user(Q),), (said(GOOD),))),
    "Capybara": (
        {"source": "x", "conversation": [{"input": Q, "output": BAD},
                                         {"input": "And?", "output": GOOD}]},
        DemonstrationRecord(TWO, (said(GOOD),))),
    "WildChat": (
        {"conversation": [user(Q) | {"turn": 1}, said(GOOD)], "model": "m", "toxic": False},
        DemonstrationRecord((user(Q) | {"turn": 1},), (said(GOOD),))),
    "Alpaca": (
        {"instruction": "Sum up.", "input": Q, "output": GOOD},
        DemonstrationRecord(f"Sum up.\n\n{Q}", GOOD)),
    "Alpaca without input": (
        {"instruction": Q, "input": "", "output": GOOD}, DemonstrationRecord(Q, GOOD)),
    "Dolly": (
        {"instruction": "Sum up.", "context": Q, "response": GOOD, "category": "qa"},
        DemonstrationRecord(f"Sum up.\n\n{Q}", GOOD)),
}  # fmt: skip


def source(*rows: dict[str, Any], **options: Any) -> GivenRows:
    return GivenRows(list(rows), validation_fraction=0.0, **options)


@pytest.mark.parametrize("name", PAIRS)
def test_a_row_of_a_set_of_preferences_is_its_pair(name):
    row, wanted = PAIRS[name]
    assert source(row).records("preferences", "train") == [wanted]


@pytest.mark.parametrize("name", DEMONSTRATIONS)
def test_a_row_of_a_set_of_conversations_is_its_demonstration(name):
    row, wanted = DEMONSTRATIONS[name]
    assert source(row).records("demonstrations", "train") == [wanted]


@pytest.mark.parametrize(
    "row",
    [
        {**ARENA, **NO, "winner_tie": 1},
        {**PAIRS["HelpSteer3"][0], "overall_preference": 0},
        {**PAIRS["WebGPT"][0], "score_0": 0.5},
        {**PAIRS["WebGPT"][0], "score_0": float("nan")},
        {**PAIRS["HelpSteer2, first"][0], "preference_strength": 0},
        {**PAIRS["Arena of 140,000"][0], "winner": "both_bad"},
        {**PAIRS["Arena, conversations"][0], "winner": "tie (bothbad)"},
        {**PAIRS["Arena, conversations"][0], "conversation_b": [user("Else?"), said(BAD)]},
        {"prompt": {**TREE, "replies": [{"text": GOOD, "rank": 0}]}},
    ],
)
def test_a_row_that_prefers_neither_answer_is_left_out_as_its_error_says(row):
    good = PAIRS["HelpSteer3" if "context" in row else "Arena"][0]
    with pytest.raises(BadRecordError, match=TIE):
        source(row, good).records("preferences", "train")
    left = source(row, good, on_bad_record="skip")
    assert left.records("preferences", "train") == [CHAT]
    assert len(left.skipped_records) == 1


@pytest.mark.parametrize("winner", ["A", "b", "left", "model_1", 0, "model_a or so"])
def test_a_winner_that_is_neither_model_nor_a_tie_is_named(winner):
    row = PAIRS["Arena, conversations"][0] | {"winner": winner}
    with pytest.raises(BadRecordError, match=rf"'winner' holds.*{winner}.*model_a or model_b"):
        source(row).records("preferences", "train")


def test_conversations_of_the_arena_are_alike_by_what_is_said():
    row = {
        "conversation_a": [user(Q) | {"num_tokens": 3, "id": "x"}, said(GOOD)],
        "conversation_b": [user(Q) | {"num_tokens": 4, "id": "y"}, said(BAD)],
    }
    (pair,) = source(row | {"winner": "model_a"}).records("preferences", "train")
    assert [(m["role"], m["content"]) for m in pair.prompt] == [("user", Q)]


def test_several_turns_of_the_arena_are_one_conversation():
    row = {"prompt": [Q, "And?"], "response_a": [BAD, GOOD], "response_b": [BAD, "No."]}
    (pair,) = source({**row, **NO, "winner_model_a": 1}).records("preferences", "train")
    assert pair == PreferenceRecord(TWO, (said(GOOD),), (said("No."),))


@pytest.mark.parametrize(
    ("row", "fix"),
    [
        ({"prompt": Q, "response": GOOD, "helpfulness": 4}, "better and the worse"),
        ({"prompt": Q, "completions": [GOOD, BAD], "labels": [True, False]}, "join the steps"),
        ({**TLDR, "summary": {"text": GOOD, "axes": {"overall": 6}}}, "comparisons"),
        ({"message_id": "m", "parent_id": None, "text": Q, "role": "prompter"}, "trees"),
    ],
)
def test_a_set_whose_rows_are_no_pairs_is_told_what_to_give(row, fix):
    with pytest.raises(BadRecordError, match=fix):
        source(row, row).records("preferences", "train")


OTHERS = {
    "ms-swift, a response": {"messages": [user(Q), said(GOOD)], "rejected_response": BAD},
    "ms-swift, messages": {
        "messages": [user(Q), said(GOOD)],
        "rejected_messages": [user(Q), said(BAD)],
    },
    "torchtune": {
        "chosen_conversations": [user(Q), said(GOOD)],
        "rejected_conversations": [user(Q), said(BAD)],
    },
    "NeMo-RL": {
        "context": [user(Q)],
        "completions": [
            {"rank": 1, "completion": [said(BAD)]},
            {"rank": 0, "completion": [said(GOOD)]},
        ],
    },
    "distilabel": {"instruction": Q, "generations": [BAD, GOOD], "ratings": [1.0, 5.0]},
    "Argilla 2": {
        "id": "1",
        "fields": {"prompt": Q, "response_a": BAD, "response_b": GOOD},
        "responses": {"preference": [{"value": "response_b", "user_id": "u"}]},
    },
}


@pytest.mark.parametrize("trainer", OTHERS)
def test_pairs_of_other_trainers_are_told_the_line_that_makes_them_ours(trainer):
    row = OTHERS[trainer]
    with pytest.raises(BadRecordError) as refused:
        source(row, row).records("preferences", "train")
    fix = str(refused.value).partition("Fix: ")[2].removesuffix(".")
    if mapped := re.search(r"columns=\{(.*)\}", fix):
        named = dict(part.split(": ") for part in mapped[1].split(", "))
        columns = {ours: None if own == "null" else own for ours, own in named.items()}
        made = GivenRows([row], columns=columns, validation_fraction=0)
    else:
        made = source(eval(fix[fix.rindex(' as {"prompt"') + 4 :], {"row": row}))
    (pair,) = made.records("preferences", "train")
    assert pair == (CHAT if isinstance(pair.prompt, tuple) else PLAIN)


def test_pairs_of_axolotl_are_read_with_their_conversation():
    row = {"messages": [user(Q)], "chosen": said(GOOD), "rejected": said(BAD)}
    assert source(row).records("preferences", "train") == [CHAT]


def test_alpaca_with_its_whole_texts_is_read_as_its_error_says():
    row = {"instruction": "Sum up.", "input": Q, "output": GOOD, "text": f"### Sum up.\n{Q}{GOOD}"}
    assert source(row).records("texts", "train")[0].text == row["text"]
    with pytest.raises(BadRecordError, match=r"columns={text: null}"):
        source(row).records("demonstrations", "train")
    (record,) = source(row, columns={"text": None}).records("demonstrations", "train")
    assert record == DemonstrationRecord(f"Sum up.\n\n{Q}", GOOD)


def test_keys_of_the_users_own_set_are_not_taken_for_those_of_a_public_one():
    rows = [{"prompt": Q, "answers": ["yes", "no"]}, {"prompt": "Else?", "answers": ["no", "yes"]}]
    (first, _) = source(*rows).records("prompts", "train")
    assert first.prompt == Q
    assert "answers" in first.columns
    mapped = source(
        {"instruction": "Sum up.", "input": Q, "output": GOOD},
        columns={"prompt": "input", "completion": "output"},
    )
    assert mapped.records("demonstrations", "train") == [DemonstrationRecord(Q, GOOD)]
    shared = {
        "question": Q,
        "chosen": "\n\nHuman: Q\n\nAssistant: A",
        "rejected": "\n\nHuman: Q\n\nAssistant: B",
    }
    (pair,) = source(shared).records("preferences", "train")
    assert pair.prompt == (user("Q"),)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("output_1", "output_2"),
        ("response_a", "response_b"),
        ("orig_response_A", "orig_response_B"),
        ("answer0", "answer1"),
    ],
)
def test_two_responses_with_a_label_are_told_how_to_be_a_pair(first, second):
    row = {"instruction": "2 + 2?", first: "4", second: "5", "preference": 1}
    with pytest.raises(BadRecordError, match=f"{first} and {second} as chosen"):
        GivenRows([row], validation_fraction=0.0).records("preferences", "train")


def test_a_hint_names_no_column_that_is_merely_spelled_alike():
    with pytest.raises(BadRecordError) as error:
        source({"context": Q, "reply": GOOD}).records("demonstrations", "train")
    assert "rename" not in str(error.value)
    with pytest.raises(BadRecordError, match="rename 'promts' to 'prompt'"):
        source({"promts": Q}).records("prompts", "train")


@pytest.mark.parametrize(
    ("row", "columns", "named"),
    [
        ({"instruction": "Sum up.", "input": Q, "output": GOOD},
         {"prompt": "instruction", "completion": "output"}, "input"),
        ({"instruction": "Sum up.", "context": Q, "response": GOOD, "category": "qa"},
         {"prompt": "instruction", "completion": "response"}, "context"),
        ({"instruction": "Sum up.", "input": "", "output": GOOD},
         {"prompt": "instruction", "completion": "output"}, None),
        ({"instruction": "Sum up.", "input": Q, "output": GOOD},
         {"prompt": "input", "completion": "output"}, "instruction"),
        ({"history": Q, "human_ref_A": GOOD, "human_ref_B": BAD, "labels": 1},
         {"prompt": "history", "completion": "human_ref_A"}, None),
        ({"instruction": "Sum up.", "input": Q, "output": GOOD}, {"prompt": "instruction"},
         "input"),
        ({"instruction": "Sum up.", "context": Q, "response": GOOD}, {"prompt": "instruction"},
         "context"),
    ],
)  # fmt: skip
def test_a_part_of_a_published_prompt_that_a_mapping_leaves_out_is_named_once(
    row, columns, named, caplog
):
    answer, kind = columns.get("completion"), "demonstrations" if len(columns) > 1 else "prompts"
    given = [row | ({answer: f"{GOOD} {i}"} if answer else {}) for i in range(3)]
    assert len(source(*given, columns=columns).records(kind, "train")) == 3
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == (named is not None)
    assert all(f"'{named}' is not read: without columns=" in line for line in said)


def test_a_mapping_reads_rows_that_would_be_no_records_as_they_are_published():
    tie = {"context": "c", "response1": "a", "response2": "b", "overall_preference": 0}
    rows = [tie | {"q": f"w{i}", "a": GOOD} for i in range(3)]
    columns = {"prompt": "q", "completion": "a"}
    assert len(source(*rows, columns=columns).records("demonstrations", "train")) == 3


PAIR = {"prompt": Q, "chosen": GOOD, "rejected": BAD}


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"score_chosen": 8.0, "score_rejected": 8.0}, True),
        ({"chosen_score": 1, "rejected_score": 2.5}, True),
        ({"chosen_score": "9", "rejected_score": "10.0"}, True),
        ({"chosen_score": "10", "rejected_score": "9"}, False),
        ({"chosen_score": "good", "rejected_score": "bad"}, False),
        ({"chosen-rating": 3, "rejected-rating": 3}, True),
        ({"rating": [9.0, 9.0], "status": "tie"}, True),
        ({"score_chosen": 8.0, "score_rejected": 3.0, "status": "unchanged"}, False),
        ({"score_chosen": 8.0}, False),
        ({"chosen_model": "m", "rejected_model": "m"}, False),
        ({"chosen_length": 3, "rejected_length": 9}, False),
        ({"score_chosen": None, "score_rejected": 3.0}, False),
    ],
)
def test_pairs_that_their_own_scores_call_ties_or_swapped_are_counted(more, named, caplog):
    good = {**PAIR, "prompt": "Else?"} | dict.fromkeys(more)
    assert len(source(good, PAIR | more).records("preferences", "train")) == 2
    assert ["1 of 2 pairs" in record.getMessage() for record in caplog.records] == [True] * named


def test_pairs_without_a_prompt_name_the_columns_that_may_hold_it(caplog):
    rows = [{"asked": f"{Q} {i}", "chosen": GOOD, "rejected": BAD, "id": i} for i in range(2)]
    assert source(*rows).records("preferences", "train")[0].prompt == ""
    assert ["'asked' is not read" in record.getMessage() for record in caplog.records] == [True]
    caplog.clear()
    source({"chosen": GOOD, "rejected": BAD, "id": 1}).records("preferences", "train")
    source(*rows, columns={"prompt": "asked"}).records("preferences", "train")
    assert not caplog.records


@pytest.mark.parametrize(
    ("name", "column"), [("PKU-SafeRLHF", "better_response_id"), ("SHP", "labels")]
)
@pytest.mark.parametrize("value", [-1, 2, "2"])
def test_an_index_that_names_no_side_is_refused(name, column, value):
    with pytest.raises(BadRecordError):
        source(PAIRS[name][0] | {column: value}).records("preferences", "train")
    for side in (0, 1):
        ((one,), (same,)) = (
            source(PAIRS[name][0] | {column: given}).records("preferences", "train")
            for given in (side, str(side))
        )
        assert one == same


@pytest.mark.parametrize("column", ["winner", "preferred"])
def test_a_strength_beside_the_preferred_side_is_not_read_as_a_signed_one(column):
    row = PAIRS["HelpSteer2, first"][0] | {"preference_strength": 2, column: "response_1"}
    with pytest.raises(BadRecordError):
        source(row).records("preferences", "train")


@pytest.mark.parametrize("given", [[], 3, "a text", None])
def test_conversations_are_read_beside_messages_that_hold_none(given):
    turns = [{"from": "human", "value": Q}, {"from": "gpt", "value": GOOD}]
    (record,) = source({"conversations": turns, "messages": given}).records(
        "demonstrations", "train"
    )
    assert record.prompt == (user(Q),)
