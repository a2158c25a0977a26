"""How reward functions are found and called, and what they may return."""

from __future__ import annotations

import asyncio
import datetime
import functools
import math
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from rlhf_lightning.rollout.scorers import base
from rlhf_lightning.rollout.scorers.base import FunctionScorer, WeightedScorer
from rlhf_lightning.rollout.scorers.functions import check_function, load_function
from tests.builders.models import EOS, prompt_batch
from tests.rollout.answers import responses_of
from tests.rollout.test_score import ConstantScorer

ROWS = [[3, 4, 5], [6]]
RESPONSES = [[7, 8, EOS], [9, 10, EOS]]
PROMPTS, COMPLETIONS = ["w3 w4 w5", "w6"], ["w7 w8", "w9 w10"]


def scored(function, **columns):
    answers = responses_of(prompt_batch(ROWS, **columns), RESPONSES)
    return FunctionScorer(function)(answers).total.tolist()


def returning(values):
    return lambda prompts, completions: values


def right(prompts, completions) -> list[float]:
    assert prompts == PROMPTS
    assert completions == COMPLETIONS
    return [1.0, 2.0]


class Checker:
    def __call__(self, completions, prompts, **columns):
        return right(prompts, completions)


def with_answer(weight, completions, prompts, answer):
    assert weight == 2.0
    assert answer == ["a", "b"]
    return right(prompts, completions)


@pytest.mark.parametrize(
    "function",
    [
        lambda completions, prompts, **columns: right(prompts, completions),
        lambda completions: right(PROMPTS, completions),
        Checker(),
        functools.partial(with_answer, 2.0),
    ],
)
def test_prompts_and_completions_arrive_under_their_names_in_any_order(function):
    assert scored(function, answer=["a", "b"]) == [1.0, 2.0]


@pytest.mark.parametrize(
    "function",
    [
        lambda queries, prompts, labels: [],
        lambda prompts, completions, /: [],
        len,
    ],
)
def test_a_function_without_completions_is_refused_where_it_is_given(function):
    with pytest.raises(ValueError, match=r"reward function .*prompts, completions, \*\*columns"):
        FunctionScorer(function)


def test_a_column_of_the_name_of_the_completions_is_refused():
    with pytest.raises(ValueError, match="'completions'"):
        scored(returning([1, 2]), completions=["a", "b"])


def test_a_function_gets_copies_of_the_columns_it_names_in_their_types():
    given = {
        "flag": [True, False],
        "day": [datetime.date(2026, 1, 2), None],
        "nested": [{"k": [1]}, {"k": [2]}],
    }
    batch = prompt_batch(ROWS, **given, other=["x", "y"])
    seen = []

    def function(prompts, completions, flag, nested, **rest):
        seen.append({"flag": list(flag), "nested": str(nested), **rest})
        nested[1]["k"].clear()
        for texts in (prompts, completions, flag):
            texts.clear()
        return [0, 0]

    answers = responses_of(batch, RESPONSES)
    both = {"one": FunctionScorer(function), "two": FunctionScorer(function)}
    WeightedScorer(both)(answers)
    assert seen[0] == seen[1] == {**given, "nested": str(given["nested"]), "other": ["x", "y"]}
    assert batch.columns["nested"] == ({"k": [1]}, {"k": [2]})
    assert answers.completions == tuple(COMPLETIONS)


def test_a_function_gets_the_domains_where_there_are_some():
    seen = []

    def function(prompts, completions, **columns):
        seen.append(columns)
        return [0.0] * len(completions)

    given = responses_of(prompt_batch(ROWS), RESPONSES)
    with_domains = replace(given, prompts=replace(given.prompts, domains=("a", "b")))
    for answers in (with_domains, given):
        FunctionScorer(function)(answers)
    assert seen == [{"domain": ["a", "b"]}, {}]
    assert FunctionScorer(right)(with_domains).total.tolist() == [1.0, 2.0]


def test_an_asynchronous_function_is_awaited_also_where_a_loop_runs():
    async def slowly(prompts, completions):
        await asyncio.sleep(0.01)
        return right(prompts, completions)

    async def notebook():
        return scored(slowly)

    assert scored(slowly) == asyncio.run(notebook()) == [1.0, 2.0]


@pytest.mark.parametrize(
    "values",
    [
        np.array([[1.0], [2.0]]),
        torch.tensor([[1.0], [2.0]], requires_grad=True),
        [[1.0], (2,)],
        [torch.tensor(1.0), np.float16(2)],
    ],
)
def test_lists_arrays_and_tensors_of_one_number_a_row_are_scores(values):
    assert scored(returning(values)) == [1.0, 2.0]


def test_none_is_nan_and_said_not_to_apply():
    answers = responses_of(prompt_batch(ROWS), RESPONSES)
    for values in ([None, 3], np.ma.array([0.0, 3.0], mask=[True, False])):
        found = FunctionScorer(returning(values), name="one")(answers)
        assert math.isnan(found.total[0])
        assert found.total[1] == 3
        assert found.applies.tolist() == [False, True]
        assert found.components["one"] is found.total


def test_a_dict_has_further_figures_that_are_parts_of_the_score_alone_and_in_a_sum():
    answers = responses_of(prompt_batch(ROWS), RESPONSES)
    given = {"score": [1.0, None], "one": [0.5, 0.25]}
    one = FunctionScorer(lambda prompts, completions: given, name="one")
    found = one(answers)
    assert found.total[0] == 1
    assert found.applies.tolist() == [True, False]
    assert found.components["one"] is found.total
    assert found.components["one_one"].tolist() == [0.5, 0.25]
    summed = WeightedScorer({"first": one, "two": FunctionScorer(right)}, weights={"first": 2.0})
    parts = summed(answers).components
    assert set(parts) == {"first", "first_one_one", "two"}
    assert parts["first_one_one"].tolist() == [0.5, 0.25]
    given["length"] = [1, 2]
    with pytest.raises(ValueError, match=r"keys \['length', 'one', 'score'\].*same in every call"):
        one(answers)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({1: 1, 2: 2}, "a dict with the keys"),
        ({"score": [1.0, 2.0], "length": [1.0]}, "1 scores for 2"),
        ((value for value in (1, 2)), "generator"),
        ([1.0], "1 scores for 2 completions"),
        (np.ones((2, 2)), r"\[1.0, 1.0\] for completion 0"),
        ([1.0, math.nan], r"nan for completion 1 \('w9 w10'\)"),
        ([math.inf, 1.0], "inf for completion 0"),
        ([1.0, -1e39], r"-1e\+39 for completion 1"),
        (["1", 2.0], "'1' for completion 0"),
    ],
)
def test_what_are_no_scores_is_refused_by_the_name_of_the_function(values, message):
    with pytest.raises(ValueError, match=f"reward function mine returned .*{message}"):
        FunctionScorer(returning(values), name="mine")(responses_of(prompt_batch(ROWS), RESPONSES))


@pytest.mark.parametrize("raised", [ValueError("two\nlines"), SystemExit("two lines")])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_it_raises_is_an_error_with_its_name_the_response_and_the_columns(
    raised, asynchronous
):
    def mine(prompts, completions, **columns):
        raise raised

    async def later(prompts, completions, **columns):
        raise raised

    later.__name__ = "mine"
    name = type(raised).__name__
    with pytest.raises(RuntimeError, match=f"mine raised {name}: two lines.*w7 w8.*answer"):
        scored(later if asynchronous else mine, answer=["a", "b"])


def test_a_function_that_reads_messages_or_lacks_a_column_is_told_what_it_was_given():
    def messages(completions, **columns):
        return [float("yes" in c[0]["content"]) for c in completions]

    def lacking(completions, answr):
        return []

    for function in (messages, lacking):
        with pytest.raises(RuntimeError, match=r"TypeError.*no lists of messages.*\['answer'\]"):
            scored(function, answer=["a", "b"])


def test_a_call_that_takes_long_is_named_again_after_each_doubling(monkeypatch, caplog):
    monkeypatch.setattr(base, "SLOW_SECONDS", 0.1)

    def slow(prompts, completions):
        time.sleep(0.3)
        return [1.0, 2.0]

    assert scored(slow) == [1.0, 2.0]
    said = [record.getMessage() for record in caplog.records]
    assert [text.split(" is ")[0] for text in said] == ["reward function slow"] * 2
    time.sleep(0.2)
    assert len(caplog.records) == 2, "it has returned"


def test_a_function_is_found_by_file_and_by_dotted_name(tmp_path):
    file = tmp_path / "rewards.py"
    file.write_text("def short(prompts, completions):\n    return [-len(c) for c in completions]\n")
    answers = responses_of(prompt_batch(ROWS), RESPONSES)
    scores = FunctionScorer(f"{file}:short")(answers)
    assert scores.total.tolist() == [-5.0, -6.0]
    assert set(scores.components) == {"short"}
    dotted = FunctionScorer("tests.rollout.test_score_functions.right")
    assert dotted(answers).total.tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nowhere.py:f", "no Python file nowhere.py; give 'path.py:name' or 'package.module.name'"),
        ("mine.py:f", "SyntaxError"),
        ("f", "give 'path.py:name'"),
        ("math.sqr", "'sqr' is no function there; did you mean sqrt"),
    ],
)
def test_a_function_that_is_not_there_is_an_error(path, message, working_folder):
    (working_folder / "mine.py").write_text("def f(:\n")
    with pytest.raises(ValueError, match=f"reward function '{path}'.*{message}"):
        load_function(path)


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ("nowhere.py", ""),
        ("mine.py", "import sys\ndef score(): ...\n"),
        ("mine.py", "def one():\n    score = 1\n    return scoer\n"),
        ("mine.py", "def scoer(:\n"),
    ],
)
def test_a_name_is_refused_without_running_its_file_as_it_is_by_running_it(
    tmp_path, monkeypatch, place, text
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(ValueError, match="rule") as by_running:
        load_function(f"{place}:scoer", "rule")
    (tmp_path / "mine.py").write_text(f"{text}1 / 0\n")
    with pytest.raises(ValueError, match="rule") as by_reading:
        check_function(f"{place}:scoer", "rule")
    assert str(by_reading.value) == str(by_running.value)


@pytest.mark.parametrize(
    "text",
    [
        "async def score(): ...",
        "class score: ...",
        "a, *score = 1, 2",
        "import numpy as score",
        "if 1:\n    try:\n        from a import score\n    except ImportError:\n        pass",
        "for score in (): ...",
        "with a as score: ...",
        "[score := a for a in ()]",
        "def make():\n    global score\n    score = 1",
        "from a import *",
        "def __getattr__(name): ...",
        "globals()['sco' + 're'] = 1",
    ],
)
def test_a_name_that_a_file_may_bind_is_left_to_running_it(tmp_path, text):
    (tmp_path / "mine.py").write_text(f"1 / 0\n{text}\n")
    check_function(f"{tmp_path}/mine.py:score")


def test_a_sum_leaves_out_what_does_not_apply():
    prompts = prompt_batch([[3]] * 4, domains=["", "", "", "code"])
    answers = responses_of(prompts, [[7, EOS]] * 4)
    one = FunctionScorer(returning([1, None, None, None]), name="one")
    two = FunctionScorer(returning([10, 20, None, 30]), name="two")
    scorer = WeightedScorer(
        {"one": one, "two": two}, weights={"two": 0.5}, domain_weights={"code": {"two": 0.0}}
    )
    found = scorer(answers)
    assert found.total[:2].tolist() == [6.0, 10.0]
    assert found.total[2:].isnan().all(), "nothing with a weight applies"
    assert found.applies.tolist() == [True, True, False, False]
    assert found.components["one"].isnan().tolist() == [False, True, True, True]
    model = ConstantScorer([1.0, 2.0, 3.0, 4.0])
    with_model = WeightedScorer({"one": one, "model": model})(answers)
    assert with_model.total.tolist() == [2.0, 2.0, 3.0, 4.0]
    assert with_model.applies.all()
