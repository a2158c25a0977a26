"""Columns of prompts arrive at a reward function as the file holds them."""

from __future__ import annotations

import datetime
import pickle
from decimal import Decimal

import pytest
import torch

from rlhf_lightning import PreferenceDataModule, PromptDataModule
from rlhf_lightning.batches import PromptBatch
from rlhf_lightning.data.record_datamodule import rows_digest
from rlhf_lightning.data.sources.given import GivenRows
from rlhf_lightning.rollout.scorers.base import FunctionScorer
from tests.builders.record_files import source_of
from tests.rollout.answers import responses_of

PLAIN = {
    "flag": [True, False, None, False],
    "count": [1, None, 3, 4],
    "share": [0.5, 1.0, None, 2.0],
    "answers": [["a", "b"], ["c"], [], None],
    "info": [{"k": [1]}, {"k": []}, None, {"k": None}],
    "label": ["yes", "", "null", None],
}
ONLY_COLUMNAR = {
    "day": [datetime.date(2026, 1, 2)] * 3 + [None],
    "at": [datetime.datetime(2026, 1, 2, 3, 4, 5)] * 4,
    "price": [Decimal("1.50"), None, Decimal("2.00"), Decimal("0.10")],
    "raw": [b"\x00\xff", b"", None, b"x"],
}


def rows_of(columns):
    rows = range(4)
    return [
        {"prompt": f"w{i}"} | {name: values[i] for name, values in columns.items()} for i in rows
    ]


def batch_of(source, tokenizer) -> PromptBatch:
    data = PromptDataModule(source, tokenizer, batch_size=4, num_iterations=1, seed=1)
    data.setup("fit")
    return next(iter(data.train_dataloader()))


def columns_of(batch):
    return {name: list(v) for name, v in batch.columns.items() if name != "prompt"}


@pytest.mark.parametrize(
    ("way", "columns"),
    [
        (".jsonl", PLAIN),
        (".parquet", PLAIN | ONLY_COLUMNAR),
        ("dataset", PLAIN | ONLY_COLUMNAR),
        ("memory", PLAIN | ONLY_COLUMNAR | {"thing": [(1, 2)] * 4}),
    ],
)
def test_a_columns_values_keep_their_types(tmp_path, tokenizer, way, columns):
    batch = batch_of(source_of(rows_of(columns), tmp_path, way), tokenizer)
    order = [int(text[1:]) for text in batch.columns["prompt"]]
    wanted = {name: [values[i] for i in order] for name, values in columns.items()}
    found = columns_of(batch)
    assert {name: found[name] for name in wanted} == wanted
    assert {name: [*map(type, found[name])] for name in wanted} == {
        name: [*map(type, values)] for name, values in wanted.items()
    }
    seen = []

    def function(prompts, completions, **given):
        seen.append(given)
        return [0.0] * len(prompts)

    copied = pickle.loads(pickle.dumps(batch.to("cpu", non_blocking=True)))
    again = PromptBatch.cat([copied[[1, 0]], copied[torch.tensor([False, False, True, True])]])
    FunctionScorer(function)(responses_of(again[[1, 0, 2, 3]], [[7]] * 4))
    assert {name: seen[0][name] for name in wanted} == wanted


@pytest.mark.parametrize("way", [".jsonl", "memory", "dataset.json", ".json.parquet"])
def test_objects_of_json_have_their_own_keys_and_nulls(tmp_path, tokenizer, way):
    tests = [[{"in": 1}, {"in": 2, "out": None}], [], None, [{"out": [1, {"k": None}]}]]
    batch = batch_of(source_of(rows_of({"tests": tests}), tmp_path, way), tokenizer)
    order = [int(text[1:]) for text in batch.columns["prompt"]]
    assert columns_of(batch)["tests"] == [tests[i] for i in order]


def test_a_column_that_few_rows_have_is_in_every_batch(tokenizer):
    rows = [{"prompt": f"w{i}"} for i in range(7)] + [{"prompt": "w7", "answer": 1}]
    given = GivenRows(rows, validation_fraction=0)
    data = PromptDataModule(given, tokenizer, batch_size=2, num_iterations=4, seed=1)
    with pytest.warns(UserWarning, match="7 of 8 training prompts lack the column 'answer'"):
        data.setup("fit")
    values = [batch.columns["answer"] for batch in data.train_dataloader()]
    assert sorted(v or 0 for both in values for v in both) == [0] * 7 + [1]


def test_values_that_show_their_place_in_memory_are_the_same_data(tokenizer):
    """An image of a hub set is read anew by each rank and by a resumed run."""

    class Image:
        def __init__(self, width):
            self.width = width

    def digest(text, image):
        rows = [{"prompt": f"{text} {i}", "image": image, "size": 4} for i in range(2)]
        data = PromptDataModule(rows, tokenizer, batch_size=1)
        return rows_digest(data.rows("train"))

    assert digest("a", Image(1)) == digest("a", Image(1)) != digest("b", Image(1))


def test_another_domain_or_another_end_of_the_prompt_is_other_data(tokenizer):
    """A scorer may weigh by domain, and what is behind the prompt is learnt."""

    def digest(kind, row):
        source = GivenRows([row], validation_fraction=0.0)
        data = kind(source, tokenizer, batch_size=1, num_iterations=1)
        return rows_digest(data.rows("train"))

    prompt = {"prompt": "a", "domain": "one"}
    assert digest(PromptDataModule, prompt) != digest(PromptDataModule, prompt | {"domain": "two"})
    pair = {"prompt": "a b", "chosen": " c", "rejected": " d"}
    longer = {"prompt": "a", "chosen": " b c", "rejected": " b d"}
    assert digest(PreferenceDataModule, pair) != digest(PreferenceDataModule, longer)
