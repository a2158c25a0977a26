"""What is said once before models answer: plain prompts beside a template, responses cut off."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest

from rlhf_lightning.data.datamodules import (
    DemonstrationDataModule,
    PreferenceDataModule,
    PromptDataModule,
)
from rlhf_lightning.data.records import PromptRecord
from rlhf_lightning.data.sources.given import GivenRows, as_source
from rlhf_lightning.data.summary import (
    warn_of_cut_responses,
    warn_of_plain_prompts,
    warn_of_repeated_prompts,
)
from tests.builders.models import tiny_tokenizer

TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
LONG, SHORT = " ".join(["w1"] * 20), "w1 w2"


def demonstrations(num_long: int, *, prompt: Any = "w3 w4") -> list[dict[str, Any]]:
    return [
        {"prompt": f"{prompt} w{i}", "completion": LONG if i < num_long else SHORT}
        for i in range(20)
    ]


def preferences(num_long: int) -> list[dict[str, Any]]:
    return [
        {"prompt": r["prompt"], "chosen": r["completion"], "rejected": "w5"}
        for r in demonstrations(num_long)
    ]


def said(rows: Any, limit: int = 10, *, split: Any = "train") -> list[str]:
    source = as_source(rows)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_cut_responses(source, split, tiny_tokenizer(), limit, key="max_new_tokens")
    return [str(one.message) for one in caught]


@pytest.mark.parametrize("rows", [demonstrations, preferences])
def test_a_length_that_cuts_more_than_a_tenth_of_the_responses_is_named_with_one_that_does_not(
    rows,
):
    (line,) = said(rows(6))
    assert line.startswith("5 of 18 ")
    assert "max_new_tokens=10," in line
    assert "max_new_tokens=21 " in line  # with EOS
    assert not said(rows(6), 21)
    assert not said(rows(1))


def test_responses_that_are_labelled_bad_or_do_not_fit_are_no_bad_records_of_the_source():
    rows = [row | {"label": i % 2 == 0} for i, row in enumerate(demonstrations(20))]
    source = as_source(rows)
    source = replace(source, on_bad_record="skip")
    assert said(source)
    assert source.skipped_records == ()


def test_a_set_of_prompts_and_a_source_that_knows_no_responses_say_nothing():
    class Prompts:
        def records(self, kind: str, split: str) -> list[PromptRecord]:
            if kind != "prompts":
                raise NotImplementedError
            return [PromptRecord("w1")]

    assert not said([{"prompt": f"w{i}"} for i in range(20)])
    assert not said(Prompts())


def test_plain_prompts_are_named_beside_a_template_alone():
    tokenizer = tiny_tokenizer()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_plain_prompts([PromptRecord("w1")], tokenizer)
        tokenizer.chat_template = TEMPLATE
        warn_of_plain_prompts([PromptRecord(({"role": "user", "content": "w1"},))], tokenizer)
        warn_of_plain_prompts([PromptRecord("w1", rendered=True)], tokenizer)
    with pytest.warns(UserWarning, match="1 of 2 rows are plain text"):
        warn_of_plain_prompts([PromptRecord("w1"), PromptRecord("w2", rendered=True)], tokenizer)


@pytest.mark.parametrize(
    ("module", "rows"),
    [
        (DemonstrationDataModule, demonstrations(0)),
        (PreferenceDataModule, preferences(0)),
        (PromptDataModule, demonstrations(0)),
    ],
)
def test_every_data_module_names_plain_prompts_and_unread_columns_once(module, rows):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    data = module([row | {"rater": "me"} for row in rows], tokenizer, batch_size=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        data.setup()
        data.setup()
    assert len([one for one in caught if "plain text" in str(one.message)]) == 1
    shown = data.render_summary()
    assert len(data.rows("validation")) > 0
    assert ("columns that are not read" in shown) == (module is not PromptDataModule)


USER = {"role": "user", "content": "Tea?"}
SAID = {"role": "assistant", "content": "Which one?"}


@pytest.mark.parametrize(
    ("turns", "response", "warned"),
    [
        ([{"role": "system", "content": "Be brief."}, USER], "Tea? A drink.", True),
        ([USER, SAID, {"role": "user", "content": "Yes"}], "Yes, it is hot.", False),
        ([USER, SAID, {"role": "tool", "content": "5 degrees"}], "5 degrees it is", False),
    ],
    ids=["its prompt", "a short turn", "the result of a tool"],
)
def test_responses_that_all_repeat_their_prompt_are_a_warning(turns, response, warned):
    rows = [
        {"messages": [*turns, {"role": "assistant", "content": f"{response} {i}"}]}
        for i in range(20)
    ]
    records = GivenRows(rows, validation_fraction=0).records("demonstrations", "train")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_repeated_prompts(records)
    assert ["begin with their prompt" in str(one.message) for one in caught] == [True] * warned


def test_pairs_of_which_one_side_repeats_the_prompt_are_a_warning():
    rows = [
        {"prompt": f"Tea {i}?", "chosen": "Yes.", "rejected": f"Tea {i}? No."} for i in range(20)
    ]
    with pytest.warns(UserWarning, match="begin with their prompt"):
        warn_of_repeated_prompts(as_source(rows).records("preferences", "train"))
