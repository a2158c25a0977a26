"""What is said once before models answer: plain prompts beside a template, repeated prompts."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from rlhf_lightning.data.datamodules import (
    DemonstrationDataModule,
    PreferenceDataModule,
    PromptDataModule,
)
from rlhf_lightning.data.sources.given import GivenRows
from rlhf_lightning.data.summary import warn_of_repeated_prompts
from tests.builders.models import tiny_tokenizer
from tests.builders.tokenizers import build_tokenizer

TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}"


def demonstrations() -> list[dict[str, Any]]:
    return [{"prompt": f"w3 w4 w{i}", "completion": "w1 w2"} for i in range(20)]


def preferences() -> list[dict[str, Any]]:
    return [{"prompt": f"w3 w{i}", "chosen": "w1 w2", "rejected": "w5"} for i in range(20)]


@pytest.mark.parametrize(
    ("module", "rows"),
    [
        (DemonstrationDataModule, demonstrations()),
        (PreferenceDataModule, preferences()),
        (PromptDataModule, demonstrations()),
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
    assert ["begins with its prompt" in str(one.message) for one in caught] == [True] * warned


@pytest.mark.parametrize(
    ("end", "warned"), [("<|end|>\n", True), ("<|im_end|>\n", False), ("\n", False)]
)
def test_a_template_whose_end_is_no_token_is_a_warning(end, warned):
    turns = "{% for m in messages %}{{ m.role }}: {{ m.content }}" + end + "{% endfor %}"
    source = GivenRows([{"messages": [USER, SAID]}], validation_fraction=0)
    data = DemonstrationDataModule(source, build_tokenizer(template=turns), batch_size=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        data.setup()
    assert any("'<|end|>', which is no token" in str(one.message) for one in caught) is warned
