"""Held-out prompts that two policies answer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rlhf_lightning.data.records import PromptRecord
from rlhf_lightning.evaluation.benchmarks import written_responses
from rlhf_lightning.evaluation.generate import Sampling
from rlhf_lightning.evaluation.held_out import (
    HeldOutComparison,
    Side,
    encode_questions,
    encode_safety_prompts,
)
from rlhf_lightning.models.forward import sequence_scores
from rlhf_lightning.rollout.generators.base import CachedGenerator
from rlhf_lightning.rollout.scorers.base import RewardModelScorer
from tests.builders.models import (
    EOS,
    PAD,
    prompt_batch,
    prompt_rows,
    tiny_policy,
    tiny_scalar_model,
)
from tests.builders.models import tiny_tokenizer as tokenizer
from tests.builders.tokenizers import build_tokenizer

RECORDS = [PromptRecord("w2 w3"), PromptRecord("w4 " * 9), PromptRecord("w5", domain="d")]


def sampling():
    return Sampling(CachedGenerator((EOS,), PAD), tokenizer(), 1.0, max_new_tokens=6)


def test_a_prompt_that_is_too_long_for_one_side_is_asked_of_neither():
    batches, asked, unused = encode_questions(
        RECORDS, [tokenizer(), tokenizer()], max_prompt_length=5, batch_size=2, answers_per_prompt=3
    )
    assert asked == [RECORDS[0], RECORDS[2]]
    assert +unused == {"over-long": 1}
    for side in batches:
        texts = [text for batch in side for text in batch.columns["prompt"]]
        assert texts == ["w2 w3"] * 3 + ["w5"] * 3
        assert torch.cat([batch.row_ids for batch in side]).tolist() == list(range(6))
        assert [len(batch) for batch in side] == [2, 2, 2]


def test_a_prompt_with_other_documents_is_another_question_and_with_other_columns_it_is_not():
    given = [{"documents": [{"text": name}]} for name in ("one", "two", "one")]
    records = [PromptRecord("w2", "", {"answer": i}, variables=v) for i, v in enumerate(given)]
    ((batch,),), asked, unused = encode_questions(
        records, [tokenizer()], max_prompt_length=5, batch_size=4
    )
    assert asked == records[:2]
    assert batch.columns["answer"] == (0, 1)
    assert +unused == {"with the prompt of an earlier row": 1}


def test_safety_prompts_that_are_too_long_are_counted_and_none_of_a_kind_is_refused(caplog):
    long = "w4 " * 9
    found = [PromptRecord("w2", "harmful"), PromptRecord(long, "harmful"), PromptRecord(long)]
    options = {"max_prompt_length": 5, "batch_size": 2, "setting": "prompts.max_length"}
    with pytest.raises(ValueError, match=r"1 of 1 harmless prompts have more than prompts.max"):
        encode_safety_prompts(
            [*found[:2], replace(found[2], domain="harmless")], [tokenizer()], **options
        )
    caplog.clear()
    ((batch,),) = encode_safety_prompts(found[:2], [tokenizer()], **options)
    assert list(batch.columns["prompt"]) == ["w2"]
    assert "1 of 2 harmful prompts have more than prompts.max_length=5 tokens" in caplog.text


def test_the_same_policy_says_the_same_again_and_other_things_as_the_baseline():
    twice = prompt_batch(prompt_rows([4, 6, 5, 3]))[torch.arange(4).repeat_interleave(2)]
    side = Side([replace(twice, row_ids=torch.arange(8))], sampling(), answers_per_prompt=2)
    comparison = HeldOutComparison([side], seed=1)
    policy = tiny_policy(seed=1)
    first, again = (comparison.ask_policy(policy, policy) for _ in range(2))
    assert first.token_ids == again.token_ids
    assert first.token_ids != comparison.ask_baseline(policy).token_ids
    assert first.token_ids[0] != first.token_ids[1] or first.token_ids[2] != first.token_ids[3]
    assert set(first.kl) == {0.0}
    found = comparison.measure(
        comparison.ask_policy(policy, policy), comparison.ask_baseline(policy)
    )
    assert found["val/num_prompts"] == 4


def test_a_written_answer_has_the_score_of_its_tokens():
    model = tiny_scalar_model("llama")
    scorer = RewardModelScorer(lambda: model)
    scorer.build()
    records, texts = [RECORDS[0], RECORDS[2]], ["w6 w7 w8", "w9"]
    said = written_responses(
        records,
        texts,
        tokenizer(),
        max_prompt_length=8,
        batch_size=2,
        device=torch.device("cpu"),
        scorer=scorer,
    )
    assert said.completions == texts
    assert said.domains == ["", "d"]
    assert said.lengths == [4, 2]  # EOS included
    for record, ids, score in zip(records, said.token_ids, said.scores, strict=True):
        prompt = tokenizer()(record.prompt)["input_ids"]
        row = torch.tensor([[*prompt, *ids]])
        with torch.no_grad():
            alone = sequence_scores(model, row, torch.ones_like(row, dtype=torch.bool))
        assert score == pytest.approx(float(alone), abs=1e-4)


def test_a_written_answer_is_rendered_with_the_variables_of_its_record():
    needs_tools = (
        "{% if not tools %}{{ raise_exception('no tools') }}{% endif %}{{ tools | tojson }}"
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    asked = ({"role": "user", "content": "why?"},)
    record = PromptRecord(asked, variables={"tools": [{"name": "f"}]})
    said = written_responses(
        [record],
        [({"role": "assistant", "content": "so"},)],
        build_tokenizer(template=needs_tools),
        max_prompt_length=100,
        batch_size=1,
        device=torch.device("cpu"),
        scorer=None,
    )
    assert said.completions == ["so"]
    assert said.lengths == [3]  # EOS included
