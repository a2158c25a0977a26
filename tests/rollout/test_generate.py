from __future__ import annotations

import pytest
import torch
from transformers import GenerationConfig

from rlhf_lightning.batches import FINISHED_BY_LENGTH, FINISHED_BY_STOP
from rlhf_lightning.rollout import noise
from rlhf_lightning.rollout.generators import base as generate
from rlhf_lightning.rollout.generators.base import (
    CachedGenerator,
    TransformersGenerator,
    as_generation,
)
from rlhf_lightning.rollout.noise import RowNoise, sample_unchecked
from tests.builders.models import EOS, MODEL_TYPES, PAD, VOCABULARY, prompt_batch
from tests.rollout.plain_generation import NOISE, ROWS, STOPS, generated, tiny, without_cache

ENGINES = (CachedGenerator, TransformersGenerator)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_both_engines_give_the_tokens_of_the_plain_model_one_row_at_a_time(model_type):
    model = tiny(model_type)
    expected = without_cache(model, ROWS)
    assert len({len(ids) for ids in expected.values()}) > 3, "rows leave the batch at many times"
    for engine in ENGINES:
        assert generated(model, prompt_batch(ROWS), engine=engine) == expected


@pytest.mark.parametrize("engine", ENGINES)
def test_engines_give_the_log_probability_of_each_token_under_what_they_sampled_from(engine):
    model, prompts = tiny("gpt2"), prompt_batch(ROWS)
    stops, drawn = (EOS, *range(40, VOCABULARY)), RowNoise(seed=5, iteration=1)
    result = engine(stops, PAD)(model, prompts, noise=drawn, temperature=0.9, max_new_tokens=12)
    body, mask = result.sequences[:, prompts.input_ids.shape[1] :], result.response_mask
    assert mask.sum(-1).unique().numel() > 3, "rows leave the batch at different steps"
    assert (result.logprobs[~mask] == 0).all()
    for row, prompt in enumerate(ROWS):
        ids = torch.tensor([[*prompt, *body[row][mask[row]].tolist()]])
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        expected = (logits.double() / 0.9).log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])
        assert len(expected) < 3 or expected.std() > 0.1
        torch.testing.assert_close(
            result.logprobs[row][mask[row]].double(), expected.squeeze(-1), rtol=0, atol=2e-5
        )


@pytest.mark.parametrize("engine", ENGINES)
def test_tokens_do_not_change_with_batch_order_padding_or_subset(engine):
    model = tiny("gpt2")
    expected = generated(model, prompt_batch(ROWS), engine=engine)
    assert generated(model, prompt_batch(ROWS, width=13, pad=EOS), engine=engine) == expected
    order = torch.randperm(len(ROWS))
    assert generated(model, prompt_batch(ROWS)[order], engine=engine) == expected
    half = generated(model, prompt_batch(ROWS[6:], first_row=6), engine=engine)
    assert half == {row: ids for row, ids in expected.items() if row >= 6}
    model(input_ids=torch.tensor([[3, 4]]))
    torch.rand(7)
    assert generated(model, prompt_batch(ROWS), engine=engine) == expected


@pytest.mark.parametrize("engine", ENGINES)
def test_other_noise_gives_other_tokens_and_a_longer_limit_only_continues(engine):
    model, prompts = tiny("gpt2"), prompt_batch(ROWS)
    expected = generated(model, prompts, engine=engine)
    longer = generated(model, prompts, max_new_tokens=18, engine=engine)
    for row, ids in expected.items():
        assert longer[row][: len(ids)] == ids
    other = engine(STOPS, PAD)(
        model, prompts, noise=NOISE.at_iteration(2), temperature=0.9, max_new_tokens=12
    )
    width = prompts.input_ids.shape[1]
    assert other.sequences[:, width].tolist() != [expected[row][0] for row in range(len(ROWS))]


HIDDEN_SETTINGS = GenerationConfig(
    do_sample=True,
    top_p=0.5,
    top_k=5,
    temperature=0.3,
    repetition_penalty=1.3,
    no_repeat_ngram_size=2,
    eos_token_id=7,
    pad_token_id=8,
    max_length=11,
)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_checkpoints_generation_config_changes_nothing(engine, monkeypatch):
    model, prompts = tiny("gpt2"), prompt_batch(ROWS)
    expected = generated(model, prompts, engine=engine)
    seen: list[torch.Tensor] = []

    def recorded(logits, uniform, *, temperature):
        seen.append(logits.clone() / temperature)
        return sample_unchecked(logits, uniform, temperature=temperature)

    for file in (generate, noise):  # the second is that of `sample`
        monkeypatch.setattr(file, "sample_unchecked", recorded)
    model.generation_config = HIDDEN_SETTINGS
    assert generated(model, prompts, engine=engine) == expected
    assert model.generation_config is HIDDEN_SETTINGS, "the model's own config is put back"
    # What was sampled from is softmax(logits / T) of the whole vocabulary, at every step.
    for t in (0, 1):
        rows = [row for row, ids in expected.items() if len(ids) > t]
        for row in rows[:4]:
            ids = ROWS[row] + expected[row][:t]
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([ids])).logits[0, -1] / 0.9
            gap = (seen[t] - logits).abs().amax(-1).min()
            assert gap < 1e-5, (t, row)
    assert all(torch.isfinite(logits).all() for logits in seen)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_response_ends_with_its_first_stop_token_and_says_how_it_ended(engine):
    model, prompts = tiny("gpt2"), prompt_batch(ROWS)
    result = engine(STOPS, PAD)(model, prompts, noise=NOISE, temperature=0.9, max_new_tokens=6)
    body = result.sequences[:, prompts.input_ids.shape[1] :]
    stopped = 0
    for ids, mask, reason in zip(body, result.response_mask, result.finish_reason, strict=True):
        length = int(mask.sum())
        assert mask.tolist() == [True] * length + [False] * (len(mask) - length)
        assert (ids[length:] == PAD).all()
        assert not any(token in STOPS for token in ids[: length - 1].tolist())
        ends = int(ids[length - 1]) in STOPS
        assert reason == (FINISHED_BY_STOP if ends else FINISHED_BY_LENGTH)
        assert ends or length == 6
        stopped += ends
    assert 0 < stopped < len(ROWS)


def test_a_sampled_pad_is_a_token_and_a_stop_at_the_limit_is_a_stop():
    prompts = torch.tensor([[5], [6], [7], [8]])
    body = torch.tensor([[PAD, 9, EOS, 3], [EOS, 3, 3, 3], [9, PAD, PAD, 4], [9, 9, 9, EOS]])
    result = as_generation(prompts, body, [EOS], PAD)
    assert result.response_mask.sum(-1).tolist() == [3, 1, 4, 4]
    assert result.finish_reason.tolist() == [0, 0, 1, 0]
    assert result.sequences[:, 1:].tolist() == [
        [PAD, 9, EOS, PAD],
        [EOS, PAD, PAD, PAD],
        [9, PAD, PAD, 4],
        [9, 9, 9, EOS],
    ]


def test_responses_are_as_wide_as_the_longest_and_pad_may_be_eos():
    body = torch.tensor([[9, EOS, 3, 3], [EOS, 3, 3, 3]])
    result = as_generation(torch.tensor([[5], [6]]), body, [EOS], EOS)
    assert result.sequences.tolist() == [[5, 9, EOS], [6, EOS, EOS]]
    assert result.response_mask.tolist() == [[True, True], [True, False]]


@pytest.mark.parametrize("engine", ENGINES)
def test_weights_cast_to_bf16_for_one_generation_do_not_outlive_it(engine):
    model, other, prompts = tiny("gpt2"), tiny("gpt2", seed=3), prompt_batch(ROWS)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        expected = generated(other, prompts, engine=engine)
        model.requires_grad_(True)
        assert generated(model, prompts, engine=engine) != expected
        assert not torch.is_autocast_cache_enabled()
        model.load_state_dict(other.state_dict())
        assert generated(model, prompts, engine=engine) == expected
        # A forward with a graph must cast anew: a cast made without one would hide the gradient.
        model(input_ids=prompts.input_ids).logits.float().sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_watcher_sees_every_token_and_changes_none():
    model, seen = tiny("gpt2"), []
    prompts = prompt_batch(ROWS[:3])
    expected = generated(model, prompts)

    def watched(*arguments):
        engine = CachedGenerator(*arguments)
        engine.watch = lambda tokens: seen.append(tokens.tolist())
        return engine

    assert generated(model, prompts, engine=watched) == expected
    assert [len(rows[0]) for rows in seen] == list(range(1, max(map(len, expected.values())) + 1))
    for row, ids in expected.items():
        place = prompts.row_ids.tolist().index(row)
        assert [rows[place][: len(ids)] for rows in seen] == [
            ids[: number + 1] for number in range(len(seen))
        ]
