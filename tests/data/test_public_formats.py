"""Rows of public sets, as they are published, with invented texts."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from rlhf_lightning.data.errors import BadRecordError
from rlhf_lightning.data.records import DemonstrationRecord, PreferenceRecord
from rlhf_lightning.data.sources.given import GivenRows
from tests.builders.encoding import assistant as said
from tests.builders.encoding import user

Q, GOOD, BAD = "How does one look after tea?", "Keep it dry.", "Ask somebody else."


def source(*rows: dict[str, Any], **options: Any) -> GivenRows:
    return GivenRows(list(rows), validation_fraction=0.0, **options)


PLAIN = PreferenceRecord(Q, GOOD, BAD)
CHAT = PreferenceRecord((user(Q),), (said(GOOD),), (said(BAD),))
TURNS = [{"from": "human", "value": Q}, {"from": "gpt", "value": GOOD}]
SHP = {"history": Q, "human_ref_A": GOOD, "human_ref_B": BAD, "labels": 1}
HELPSTEER2 = {"prompt": Q, "response_1": GOOD, "response_2": BAD, "preference_strength": -1}
HELPSTEER3 = {
    "context": [user(Q)], "response1": BAD, "response2": GOOD, "overall_preference": 2
}  # fmt: skip
READ: dict[str, tuple[dict[str, Any], Any]] = {
    "HelpSteer3": (HELPSTEER3, CHAT),
    "HelpSteer3, first": (
        HELPSTEER3 | {"response1": GOOD, "response2": BAD, "overall_preference": -1}, CHAT),
    "HelpSteer2": (HELPSTEER2, PLAIN),
    "HelpSteer2, second": (
        HELPSTEER2 | {"response_1": BAD, "response_2": GOOD, "preference_strength": 2}, PLAIN),
    "SHP": (SHP, PLAIN),
    "SHP, B": (SHP | {"human_ref_A": BAD, "human_ref_B": GOOD, "labels": "0"}, PLAIN),
    "Nectar": (
        {"prompt": f"\n\nHuman: {Q}\n\nAssistant: ", "turns": 1, "answers": [
            {"answer": "Or so.", "rank": 2.0}, {"answer": BAD, "rank": 7.0},
            {"answer": GOOD, "rank": 1.0}]}, CHAT),
    "UltraFeedback": (
        {"models": ["a", "b"], "instruction": Q, "completions": [
            {"response": BAD, "overall_score": 2.5}, {"response": GOOD, "overall_score": 9}]},
        PLAIN),
    "HH-RLHF": (
        {side: f"\n\nHuman: {Q}\n\nAssistant: {text}"
         for side, text in (("chosen", GOOD), ("rejected", BAD))}, CHAT),
    "ShareGPT": ({"conversations": TURNS}, DemonstrationRecord((user(Q),), (said(GOOD),))),
    "ShareGPT in a cell": (
        {"conversations": json.dumps(TURNS)}, DemonstrationRecord((user(Q),), (said(GOOD),))),
    "conversations with roles": (
        {"conversations": [user(Q), said(GOOD)]}, DemonstrationRecord((user(Q),), (said(GOOD),))),
    "Alpaca": (
        {"instruction": "Sum up.", "input": Q, "output": GOOD},
        DemonstrationRecord(f"Sum up.\n\n{Q}", GOOD)),
    "Alpaca without input": (
        {"instruction": Q, "input": "", "output": GOOD}, DemonstrationRecord(Q, GOOD)),
    "Alpaca, no input": (
        {"instruction": Q, "input": "<noinput>", "output": GOOD}, DemonstrationRecord(Q, GOOD)),
}  # fmt: skip


@pytest.mark.parametrize(("row", "wanted"), READ.values(), ids=READ)
def test_a_row_of_a_public_set_is_its_record(row, wanted):
    kind = "preferences" if isinstance(wanted, PreferenceRecord) else "demonstrations"
    assert source(row).records(kind, "train") == [wanted]


@pytest.mark.parametrize(
    "tie",
    [
        HELPSTEER3 | {"overall_preference": 0},
        HELPSTEER3 | {"overall_preference": float("nan")},
        HELPSTEER2 | {"preference_strength": 0},
    ],
)
def test_a_tie_is_left_out_as_its_error_says(tie):
    good = HELPSTEER3 if "context" in tie else HELPSTEER2
    with pytest.raises(BadRecordError, match="on_bad_record=skip"):
        source(tie, good).records("preferences", "train")
    left = source(tie, good, on_bad_record="skip")
    assert len(left.records("preferences", "train")) == len(left.skipped_records) == 1


@pytest.mark.parametrize(
    "row", [SHP | {"labels": 2}, SHP | {"labels": -1}, HELPSTEER2 | {"winner": "response_1"}]
)
def test_a_side_that_is_not_told_is_refused(row):
    with pytest.raises(BadRecordError):
        source(row).records("preferences", "train")


MAPPED: dict[str, dict[str, Any]] = {
    "Stack Exchange": {"qid": 1, "question": Q, "response_j": GOOD, "response_k": BAD},
    "Orca": {"system": "", "question": Q, "chosen": GOOD, "rejected": BAD},
    "axolotl": {"messages": [user(Q)], "chosen": said(GOOD), "rejected": said(BAD)},
    "torchtune": {"chosen_conversations": [user(Q), said(GOOD)],
                  "rejected_conversations": [user(Q), said(BAD)]},
}  # fmt: skip
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "Arena": ({
        "prompt": json.dumps([Q]), "response_a": json.dumps([BAD]), "winner_model_a": 0,
        "response_b": json.dumps([GOOD])}, "winner_model_a"),
    "OpenAI's summaries": ({
        "info": {"post": Q}, "summaries": [{"text": BAD}, {"text": GOOD}], "choice": 1},
        "info (post), summaries (text), choice"),
    "Alpaca pairs": ({"instruction": Q[:8], "input": Q[10:], "chosen": GOOD, "rejected": BAD},
                     "instruction, input"),
}  # fmt: skip


@pytest.mark.parametrize("row", MAPPED.values(), ids=MAPPED)
def test_a_row_of_another_set_is_refused_with_the_line_that_makes_it_ours(row):
    with pytest.raises(BadRecordError) as refused:
        source(row, row).records("preferences", "train")
    fix = str(refused.value).partition("Fix: ")[2].removesuffix(".")
    if mapped := re.search(r"columns=\{(.*?)\}", fix):
        named = dict(part.split(": ") for part in mapped[1].split(", "))
        columns = {ours: None if own == "null" else own for ours, own in named.items()}
        made = source(row, columns=columns)
    else:
        made = source(eval(fix[fix.rindex(' as {"prompt"') + 4 :], {"row": row}))
    (pair,) = made.records("preferences", "train")
    texts = pair.prompt if isinstance(pair.prompt, str) else pair.prompt[0]["content"]
    assert texts.split()[:2] == Q.split()[:2]
    assert (pair.chosen, pair.rejected) in ((GOOD, BAD), (CHAT.chosen, CHAT.rejected))


@pytest.mark.parametrize(("row", "keys"), REFUSED.values(), ids=REFUSED)
def test_a_row_that_columns_cannot_map_is_refused_with_its_keys_and_those_of_a_pair(row, keys):
    with pytest.raises(BadRecordError) as refused:
        source(row, row).records("preferences", "train")
    fix = str(refused.value).partition("Fix: ")[2]
    assert keys in fix
    assert 'write each row as {"prompt": ..., "chosen": ' in fix


def test_keys_of_the_users_own_set_are_not_taken_for_those_of_a_public_one():
    (first,) = source({"prompt": Q, "answers": ["yes", "no"]}).records("prompts", "train")
    assert first.prompt == Q
    assert "answers" in first.columns
    mapped = source(
        {"instruction": "Sum up.", "input": Q, "output": GOOD},
        columns={"prompt": "input", "completion": "output"},
    )
    (record,) = mapped.records("demonstrations", "train")
    assert record == DemonstrationRecord(Q, GOOD)
    assert record.origin.unread == ("instruction",)
    row = {"question": Q, "chosen": [user(Q), said(GOOD)], "rejected": [user(Q), said(BAD)]}
    assert source(row).records("preferences", "train") == [CHAT]
    (other,) = source({"messages": [user(Q), said(GOOD)], "conversations": TURNS[:1]}).records(
        "demonstrations", "train"
    )
    assert other.origin.unread == ("conversations",)
