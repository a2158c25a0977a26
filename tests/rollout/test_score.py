from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from rlhf_lightning.rollout.generators.base import as_generation
from rlhf_lightning.rollout.scorers.base import (
    FunctionScorer,
    Responses,
    RewardModelScorer,
    Scores,
    WeightedScorer,
)
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

    def build(self, base=None) -> list[torch.nn.Module]:
        return []

    def __call__(self, answers) -> Scores:
        total = torch.tensor(self.values)
        return Scores(total, {"constant": total})


def test_completions_are_the_actions_as_text_without_special_tokens():
    empty = responses_of(prompt_batch([[3]]), [[EOS]])
    assert (empty.completions, empty.finished.tolist()) == (("",), [True])
    got = answers()
    assert got.completions == ("w7 w8", "w9 w9 w10")
    assert got.finished.tolist() == [True, False]
    assert (~got.attention_mask).nonzero().tolist() == [[0, 6], [1, 0], [1, 1]]


def test_the_token_that_ended_a_response_is_no_text_of_it_though_it_is_no_special_token():
    prompts = prompt_batch(ROWS[:2])
    word = 9  # a plain word, as a mark of a chat template may be
    body = torch.tensor([[7, 8, word], [7, word, PAD]])
    generation = as_generation(prompts.input_ids, body, [EOS, word], PAD)
    assert Responses.of(prompts, generation, tiny_tokenizer()).completions == ("w7 w8", "w7")
    cut = as_generation(prompts.input_ids, body, [EOS], PAD)
    assert Responses.of(prompts, cut, tiny_tokenizer()).completions == ("w7 w8 w9", "w7 w9")


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
    with pytest.raises(ValueError, match=r"\['lenght'\], but the scorers are \['length'\]"):
        WeightedScorer({"length": ConstantScorer([])}, **{where: weights})


def reward_model_scorer(**options) -> tuple[RewardModelScorer, Callable[[], int]]:
    loads = []

    def load():
        loads.append(1)
        return tiny_scalar_model("llama", bias=0.5)

    return RewardModelScorer(load, **options), lambda: len(loads)


def test_a_reward_model_is_built_once_and_frozen():
    scorer, loads = reward_model_scorer()
    with pytest.raises(RuntimeError, match=r"build\(\)"):
        scorer(answers())
    (model,) = scorer.build()
    assert scorer.build() == [model]
    assert loads() == 1
    assert not model.training
    assert not any(p.requires_grad for p in model.parameters())
    combined = WeightedScorer({"rm": scorer, "length": FunctionScorer(length_of)})
    assert combined.build() == [model]


def test_a_reward_model_reads_the_last_token_of_each_answer_in_its_context_padding_or_not():
    scorer, _ = reward_model_scorer(micro_batch_size=1)
    (model,) = scorer.build()
    got = scorer(answers()).total
    for row, (prompt, response) in enumerate(zip(ROWS, RESPONSES, strict=True)):
        states = model.trunk(input_ids=torch.tensor([prompt + response])).last_hidden_state
        expected = model.head(states[0, -1])[0]
        torch.testing.assert_close(got[row], expected, rtol=0, atol=1e-5)
    same_ids = responses_of(prompt_batch(ROWS, pad=EOS, width=5), RESPONSES, pad=EOS)
    assert torch.equal(scorer(same_ids).total, got)
    model.trunk.config.max_position_embeddings = 5
    with pytest.raises(ValueError, match="a row has 6 tokens, and LlamaModel reads 5"):
        scorer(answers())
