"""How reward functions are called, and what they may return."""

from __future__ import annotations

import asyncio
import datetime
import functools
import itertools
import math

import numpy as np
import pandas
import pytest
import torch

from rlhf_lightning.rollout.scorers.base import FunctionScorer, Scores, WeightedScorer
from tests.builders.models import EOS, prompt_batch
from tests.rollout.answers import responses_of

ROWS = [[3, 4, 5], [6]]
RESPONSES = [[7, 8, EOS], [9, 10, EOS]]
PROMPTS, COMPLETIONS = ["w3 w4 w5", "w6"], ["w7 w8", "w9 w10"]


def scored(function, *, timeout_seconds=30.0, **columns):
    answers = responses_of(prompt_batch(ROWS, **columns), RESPONSES)
    return FunctionScorer(function, timeout_seconds=timeout_seconds)(answers).total.tolist()


def right(prompts, completions) -> list[float]:
    assert prompts == PROMPTS
    assert completions == COMPLETIONS
    return [1.0, 2.0]


class Network(torch.nn.Module):
    def forward(self, completions, prompts):
        return torch.tensor(right(prompts, completions))


class Checker:
    def __call__(self, completions, prompts, **columns):
        return right(prompts, completions)

    def method(self, completions, prompts):
        return right(prompts, completions)

    @classmethod
    def of_class(cls, *, completions, prompts):
        return right(prompts, completions)


def swapped(completions, prompts, **columns):
    return right(prompts, completions)


def with_weight(weight, completions, prompts, answer=None):
    assert weight == 2.0
    assert answer == ["a", "b"]
    return right(prompts, completions)


def plainly_wrapped(function):
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


def adapted(function):
    @functools.wraps(function)
    def wrapper(prompts, completions, **columns):
        return right(prompts, completions)

    return wrapper


def openrlhf(queries, prompts, labels):
    raise AssertionError


def by_name(answer, completions, prompts):
    assert answer == ["a", "b"]
    return right(prompts, completions)


def positional_only(completions, prompts, /, answer):
    return by_name(answer, completions, prompts)


def by_kind(completions, least, answer):
    assert least == 2
    return by_name(answer, completions, PROMPTS)


def by_dispatch(completions, prompts):
    return right(prompts, completions)


@pytest.mark.parametrize(
    "function",
    [
        swapped,
        Network(),
        by_name,
        positional_only,
        lambda p, c: right(p, c),
        lambda p, c, **k: right(p, c),
        lambda a, b: right(a, b),
        lambda x, y: right(x, y),
        lambda q, r: right(q, r),
        lambda _, c, answer: right(PROMPTS, c),
        lambda _, completions: right(PROMPTS, completions),
        lambda prompts, c, **k: right(prompts, c),
        lambda *both: right(*both),
        lambda *args, **k: right(k["prompts"], k["completions"]),
        lambda **k: right(k["prompts"], k["completions"]),
        lambda completions: right(PROMPTS, completions),
        lambda completions, answer=None, prompts=(): by_name(answer, completions, prompts),
        lambda *, completions, prompts, answer: by_name(answer, completions, prompts),
        Checker(),
        Checker().method,
        Checker.of_class,
        functools.partial(with_weight, 2.0),
        functools.partial(with_weight, weight=2.0),
        eval("lambda completions, least=2, answer=None, /: by_kind(completions, least, answer)"),
        functools.singledispatch(by_dispatch),
        plainly_wrapped(swapped),
        functools.wraps(swapped)(plainly_wrapped(swapped)),
        adapted(openrlhf),
    ],
)
def test_prompts_and_completions_arrive_under_their_names_in_any_order(function):
    assert scored(function, answer=["a", "b"]) == [1.0, 2.0]


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (openrlhf, "openrlhf"),
        (lambda queries, prompts, labels, **k: [], "queries"),
        (lambda prompts, responses: [], "responses"),
        (lambda data_source, solution_str, ground_truth: [], "solution_str"),
        (lambda c, p: [], r"\(c, p\)"),
        (lambda r, q: [], r"\(r, q\)"),
        (lambda y, x: [], r"\(y, x\)"),
        (lambda a, q: [], r"\(a, q\)"),
        (lambda o, i, **k: [], r"\(o, i, \*\*k\)"),
        (lambda r, **k: [], r"\(r, \*\*k\)"),
        (lambda prompts: [], "prompts"),
        (lambda: [], r"takes \(\)"),
        (functools.partial(openrlhf, labels=[]), "openrlhf"),
        (Checker, "Checker"),
        (len, "len"),
    ],
)
def test_a_function_with_other_names_is_refused_where_it_is_given(function, name):
    with pytest.raises(ValueError, match=name):
        FunctionScorer(function)


def test_a_function_whose_optional_parameters_may_mean_the_completions_is_refused():
    def verl(data_source=None, solution_str=None, **others):
        return [0.0, 0.0]

    with pytest.raises(ValueError, match="'solution_str'"):
        scored(verl, data_source=["a", "b"])
    assert scored(verl, data_source=["a", "b"], solution_str=["c", "d"]) == [0, 0]


def test_a_column_of_the_name_of_the_completions_is_refused():
    with pytest.raises(ValueError, match=r"column 'completions'.*rename"):
        scored(lambda p, c: [1, 2], completions=["a", "b"])


def test_columns_keep_their_types_and_are_copies():
    given = {
        "flag": [True, False],
        "day": [datetime.date(2026, 1, 2), None],
        "answers": [["a"], ["b", "c"]],
        "nested": [{"k": [1]}, {"k": [2]}],
    }
    batch = prompt_batch(ROWS, **given)

    def function(prompts, completions, flag, day, answers, nested):
        assert {"flag": flag, "day": day, "answers": answers, "nested": nested} == given
        answers[0].append("z")
        nested[1]["k"].clear()
        return [0, 0]

    FunctionScorer(function)(responses_of(batch, RESPONSES))
    assert batch.columns["answers"] == (["a"], ["b", "c"])
    assert batch.columns["nested"] == ({"k": [1]}, {"k": [2]})


async def slowly(prompts, completions):
    await asyncio.sleep(0.01)
    return right(prompts, completions)


class AsyncChecker:
    async def __call__(self, completions, **columns):
        return [1.0, 2.0]


@pytest.mark.parametrize(
    "function", [slowly, AsyncChecker(), functools.partial(slowly), lambda p, c: slowly(p, c)]
)
def test_an_asynchronous_function_is_awaited_also_where_a_loop_runs(function):
    assert scored(function) == [1.0, 2.0]

    async def notebook():
        return scored(function)

    assert asyncio.run(notebook()) == [1.0, 2.0]


@pytest.mark.parametrize(
    "values",
    [
        np.array([[1.0], [2.0]]),
        torch.tensor([[1.0], [2.0]], requires_grad=True),
        torch.tensor([1.0, 2.0], dtype=torch.bfloat16, requires_grad=True),
        [[1.0], (2,)],
        [torch.tensor(1.0), np.float16(2)],
        (value for value in (1, 2)),
        {"a": 1, "b": 2}.values(),
        pandas.DataFrame({"score": [1.0, 2.0]}),
        pandas.Series([1, 2]),
        range(1, 3),
    ],
)
def test_rows_of_one_number_arrays_and_generators_are_scores(values):
    assert scored(lambda p, c: values) == [1.0, 2.0]


def test_none_is_nan_and_said_not_to_apply():
    answers = responses_of(prompt_batch(ROWS), RESPONSES)
    for values in ([None, 3], np.ma.array([0.0, 3.0], mask=[True, False])):
        found = FunctionScorer(lambda p, c, values=values: values)(answers)
        assert math.isnan(found.total[0])
        assert found.total[1] == 3
        assert found.applies.tolist() == [False, True]


@pytest.mark.parametrize(
    "values",
    [
        {0.5, 1.5},
        frozenset({1, 2}),
        {1: 1, 2: 2}.keys(),
        "12",
        b"12",
        bytearray(b"12"),
        pandas.DataFrame([[1.0, 2.0], [3.0, 4.0]]),
        None,
        1.5,
        torch.tensor(1.0),
        np.array([[1.0, 2.0], [3.0, 4.0]]),
        [[1.0, 2.0], [3.0, 4.0]],
        [1 + 2j, 1.0],
        ["1", "2"],
        [torch.zeros(2), 1.0],
        itertools.count(),
        [1.0],
        [1.0, -1e39],
        [np.float64("nan"), 1.0],
        [[None, 1], 2],
    ],
)
def test_what_are_no_scores_is_refused_by_the_name_of_the_function(values):
    def mine(prompts, completions):
        return values

    with pytest.raises(ValueError, match="reward function mine returned"):
        scored(mine)


class Own(BaseException):
    pass


class UnprintableError(Exception):
    def __str__(self):
        raise ValueError


def deep(n):
    return deep(n + 1)


@pytest.mark.parametrize(
    ("raised", "name"),
    [
        (Own("gone"), "Own: gone"),
        (UnprintableError(), "UnprintableError"),
        (SystemExit(0), "SystemExit: 0"),
        (GeneratorExit(), "GeneratorExit"),
        (asyncio.CancelledError(), "CancelledError"),
        (RecursionError("deep"), "RecursionError"),
        (ValueError("two\nlines"), "two lines"),
    ],
)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_whatever_it_raises_is_an_error_with_its_name(raised, name, asynchronous):
    def mine(prompts, completions):
        raise raised

    async def later(prompts, completions):
        raise raised

    if asynchronous and isinstance(raised, asyncio.CancelledError | GeneratorExit):
        pytest.skip("no coroutine raises these by itself")
    later.__name__ = "mine"
    with pytest.raises(RuntimeError, match=f"reward function mine raised .*{name}"):
        scored(later if asynchronous else mine)


@pytest.mark.parametrize(
    "function",
    [
        lambda prompts, completions: [len(c[0]["content"]) for c in completions],
        lambda prompts, completions: [c[-1]["content"].count("w") for c in completions],
    ],
)
def test_a_function_of_messages_is_told_that_completions_are_texts(function):
    with pytest.raises(RuntimeError, match=r"TypeError.*completions \(texts, no lists of messages"):
        scored(function)


def test_an_endless_recursion_is_named():
    with pytest.raises(RuntimeError, match="RecursionError"):
        scored(lambda p, c: deep(0))


def test_ctrl_c_is_passed_on():
    def interrupted(prompts, completions):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        scored(interrupted)


class Fixed:
    def __init__(self, *values):
        self.values = values

    def build(self, base=None):
        return []

    def __call__(self, answers):
        total = torch.tensor(self.values)
        return Scores(total, {"fixed": total})


def test_a_sum_leaves_out_what_does_not_apply():
    prompts = prompt_batch([[3]] * 4, domains=["", "", "", "code"])
    answers = responses_of(prompts, [[7, EOS]] * 4)
    one = FunctionScorer(lambda p, c: [1, None, None, None], name="one")
    two = FunctionScorer(lambda p, c: [10, 20, None, 30], name="two")
    scorer = WeightedScorer(
        {"one": one, "two": two}, weights={"two": 0.5}, domain_weights={"code": {"two": 0.0}}
    )
    found = scorer(answers)
    assert found.total[:2].tolist() == [6.0, 10.0]
    assert found.total[2:].isnan().all(), "nothing with a weight applies"
    assert found.applies.tolist() == [True, True, False, False]
    assert found.components["one"].isnan().tolist() == [False, True, True, True]
    with_model = WeightedScorer({"one": one, "model": Fixed(1.0, 2.0, 3.0, 4.0)})(answers)
    assert with_model.total.tolist() == [2.0, 2.0, 3.0, 4.0]
    assert with_model.applies.all()
