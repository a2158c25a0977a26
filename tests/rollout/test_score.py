from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from rlhf_lightning.rollout.generators.base import as_generation
from rlhf_lightning.rollout.scorers.base import (
    FunctionScorer,
    RewardModelScorer,
    Scores,
    WeightedScorer,
    make_responses,
)
from rlhf_lightning.rollout.scorers.functions import load_function
from tests.builders.models import EOS, PAD, prompt_batch, tiny_scalar_model, tiny_tokenizer
from tests.rollout.answers import responses_of

ROWS = [[3, 4, 5], [6]]
RESPONSES = [[7, 8, EOS], [9, PAD, 9, 10]]


def answers(**columns):
    return responses_of(prompt_batch(ROWS, **columns), RESPONSES)


def length_of(prompts: list[str], completions: list[str]) -> list[float]:
    return [float(len(text.split())) for text in completions]


class ConstantScorer:
    def __init__(self, values: list[float]) -> None:
        self.values = values

    def build(self) -> list[torch.nn.Module]:
        return []

    def __call__(self, answers) -> Scores:
        total = torch.tensor(self.values)
        return Scores(total, {"constant": total})


def test_completions_are_the_actions_as_text_without_special_tokens():
    got = answers()
    assert got.completions == ("w7 w8", "w9 w9 w10")
    assert got.finished.tolist() == [True, False]
    assert got.attention_mask.tolist() == [
        [True, True, True, True, True, True, False],
        [False, False, True, True, True, True, True],
    ]


def test_the_token_that_ended_a_response_is_no_text_of_it_though_it_is_no_special_token():
    prompts = prompt_batch(ROWS[:2])
    word = 9  # a plain word, as a mark of a chat template may be
    body = torch.tensor([[7, 8, word], [7, word, PAD]])
    generation = as_generation(prompts.input_ids, body, [EOS, word], PAD)
    assert make_responses(prompts, generation, tiny_tokenizer()).completions == ("w7 w8", "w7")
    cut = as_generation(prompts.input_ids, body, [EOS], PAD)
    assert make_responses(prompts, cut, tiny_tokenizer()).completions == ("w7 w8 w9", "w7 w9")


def test_a_function_gets_prompts_completions_and_the_columns_it_asked_for():
    seen = {}

    def function(prompts, completions, answer, **rest):
        seen.update(prompts=prompts, completions=completions, answer=answer, rest=rest)
        return [1, 2.5]

    scores = FunctionScorer(function)(answers(answer=["a", "b"], level=["x", "y"]))
    assert seen == {
        "prompts": ["w3 w4 w5", "w6"],
        "completions": ["w7 w8", "w9 w9 w10"],
        "answer": ["a", "b"],
        "rest": {"level": ["x", "y"]},
    }
    assert scores.total.tolist() == [1.0, 2.5]
    assert scores.total.dtype == torch.float32
    assert scores.components["function"] is scores.total


@pytest.mark.parametrize(
    "values", [np.array([0.5, 2.0], dtype=np.float32), torch.tensor([0.5, 2.0]), (True, 2)]
)
def test_numbers_of_numpy_and_torch_count_as_numbers(values):
    scores = FunctionScorer(lambda prompts, completions: values)(answers())
    assert scores.total.tolist() == [float(values[0]), 2.0]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda p, c: [1.0], r"returned 1 scores for 2 completions: return one number"),
        (lambda p, c: [1.0, math.nan], r"returned nan for completion 1 \('w9 w9 w10'\)"),
        (lambda p, c: [math.inf, 1.0], r"returned inf for completion 0 \('w7 w8'\): .* finite"),
        (lambda p, c: ["1", 1.0], r"returned '1' for completion 0"),
        (lambda p, c: [1.0, [0.5, 1.0]], r"returned \[0.5, 1.0\] for completion 1"),
        (lambda p, c: [1e39, 1.0], r"returned 1e\+39 for completion 0"),
        (lambda p, c: [10**400, 1.0], r"returned 10{2,30}\.\.\.0+ for completion 0"),
        (lambda p, c: [10**5000, 1.0], r"returned a value of type int for completion 0"),
    ],
)
def test_a_function_that_returns_nonsense_is_named_with_the_row(function, message):
    with pytest.raises(ValueError, match=f"reward function mine {message}"):
        FunctionScorer(function, name="mine")(answers())


def test_a_function_gets_the_domains_where_there_are_some():
    seen = []

    def function(prompts, completions, **columns):
        seen.append(columns)
        return [0.0] * len(completions)

    given = answers()
    domains = tuple(f"d{row}" for row in range(len(given.prompts)))
    FunctionScorer(function)(replace(given, prompts=replace(given.prompts, domains=domains)))
    FunctionScorer(function)(given)
    assert seen == [{"domain": list(domains)}, {}]
    plain = FunctionScorer(lambda prompts, completions: [1.0] * len(completions))
    with_domains = replace(given, prompts=replace(given.prompts, domains=domains))
    assert plain(with_domains).total.sum() > 0


def test_scores_by_row_in_a_dict_are_refused():
    count = len(answers().completions)
    with pytest.raises(ValueError, match=r"returned dict, .*one number a compl"):
        FunctionScorer(lambda prompts, completions: dict.fromkeys(range(count), 1.0))(answers())


def test_a_function_that_raises_is_named_with_its_columns():
    def broken(prompts, completions, *, answr):
        return []

    with pytest.raises(ValueError, match=r"broken needs the column 'answr'.* \['answer'\]"):
        FunctionScorer(broken)(answers(answer=["a", "b"]))

    def messages(completions, **columns):
        return [float("yes" in c[0]["content"]) for c in completions]

    with pytest.raises(
        RuntimeError,
        match=r"function messages raised TypeError: .*no lists of messages.*'answer'\]",
    ):
        FunctionScorer(messages)(answers(answer=["a", "b"]))


def test_a_function_that_ends_the_process_has_failed():
    def leaving(prompts, completions):
        raise SystemExit(0)

    with pytest.raises(RuntimeError, match="reward function leaving raised SystemExit: 0; it was"):
        FunctionScorer(leaving)(answers())


def test_a_function_may_do_with_its_lists_what_it_likes():
    given = answers(answer=["a", "b"])

    def emptying(prompts, completions, answer):
        for texts in (prompts, completions, answer):
            texts.clear()
        return [1, 2]

    both = WeightedScorer({"one": FunctionScorer(emptying), "two": FunctionScorer(emptying)})
    assert both(given).total.tolist() == [2.0, 4.0]
    assert given.completions == ("w7 w8", "w9 w9 w10")
    assert list(given.prompts.columns["answer"]) == ["a", "b"]
    with pytest.raises(ValueError, match="returned 1 scores for 2 completions"):
        FunctionScorer(lambda p, c: [p.clear(), c.clear(), 1.0][2:])(answers())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import sys\nsys.exit(0)\n", "while it was read: SystemExit: 0"),
        ("def score(:\n", "while it was read: SyntaxError"),
        ("1 / 0\n", "while it was read: ZeroDivisionError: division by zero"),
    ],
)
def test_a_file_that_cannot_be_read_as_python_is_named(tmp_path, text, message):
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(ValueError, match=rf"mine\.py:score': {message}"):
        FunctionScorer(f"{tmp_path}/mine.py:score")


def test_a_function_is_found_by_file_and_by_dotted_name(tmp_path):
    file = tmp_path / "rewards.py"
    file.write_text("def short(prompts, completions):\n    return [-len(c) for c in completions]\n")
    scores = FunctionScorer(f"{file}:short")(answers())
    assert scores.total.tolist() == [-5.0, -9.0]
    assert set(scores.components) == {"short"}
    dotted = FunctionScorer("tests.rollout.test_score.length_of")
    assert dotted(answers()).total.tolist() == [2.0, 3.0]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nowhere.py:f", "no file nowhere.py; give 'path.py:name' or 'package.module.name'"),
        ("no.such.module.f", "No module named 'no'"),
        ("f", "give 'path.py:name'"),
        ("math.nothing", "'nothing' is no callable there"),
        ("math.pi", "'pi' is no callable there"),
    ],
)
def test_a_function_that_is_not_there_is_an_error(path, message):
    with pytest.raises(ValueError, match=f"reward function '{path}'.*{message}"):
        load_function(path)


def test_a_weighted_sum_takes_the_domains_weights_where_there_are_some():
    prompts = prompt_batch([[3], [4], [5]], domains=["maths", "poems", ""])
    scorer = WeightedScorer(
        {"a": ConstantScorer([1.0, 2.0, 3.0]), "b": ConstantScorer([10.0, 20.0, 30.0])},
        weights={"b": 0.5},
        domain_weights={"maths": {"b": 2.0}, "poems": {"a": 0.0}},
    )
    scores = scorer(responses_of(prompts, [[7, EOS]] * 3))
    assert scores.total.tolist() == [1.0 + 20.0, 0.0 + 10.0, 3.0 + 15.0]
    assert scores.components["a"].tolist() == [1.0, 2.0, 3.0], "components are unweighted"
    assert scores.components["b"].tolist() == [10.0, 20.0, 30.0]


@pytest.mark.parametrize("where", ["weights", "domain_weights"])
def test_a_weight_for_no_scorer_is_refused(where):
    weights = {"lenght": 1.0} if where == "weights" else {"maths": {"lenght": 1.0}}
    with pytest.raises(ValueError, match=r"weights has 'lenght', but the scorers are \['length'\]"):
        WeightedScorer({"length": ConstantScorer([])}, **{where: weights})


def reward_model_scorer(**options) -> tuple[RewardModelScorer, Callable[[], int]]:
    loads = []

    def load():
        loads.append(1)
        return tiny_scalar_model("llama", bias=0.5)

    return RewardModelScorer(load, **options), lambda: len(loads)


def test_a_reward_model_is_loaded_once_and_frozen():
    scorer, loads = reward_model_scorer()
    (model,) = scorer.build()
    assert scorer.build() == [model]
    assert loads() == 1
    assert not model.training
    assert not any(p.requires_grad for p in model.parameters())
    combined = WeightedScorer({"rm": scorer, "length": FunctionScorer(length_of)})
    assert combined.build() == [model]


def test_a_reward_model_reads_the_last_token_of_each_answer_padding_or_not():
    scorer, _ = reward_model_scorer(micro_batch_size=1)
    (model,) = scorer.build()
    got = scorer(answers()).total
    for row, (prompt, response) in enumerate(zip(ROWS, RESPONSES, strict=True)):
        states = model.trunk(input_ids=torch.tensor([prompt + response])).last_hidden_state
        expected = model.head(states[0, -1])[0]
        torch.testing.assert_close(got[row], expected, rtol=0, atol=1e-5)
    same_ids = responses_of(prompt_batch(ROWS, pad=EOS, width=5), RESPONSES, pad=EOS)
    assert torch.equal(scorer(same_ids).total, got)


def test_a_reward_model_that_was_not_built_is_an_error():
    scorer, _ = reward_model_scorer()
    with pytest.raises(RuntimeError, match=r"build\(\) was not called"):
        scorer(answers())
