"""What makes the cached generator fast changes no token."""

from __future__ import annotations

import inspect

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

from rlhf_lightning.rollout.generators import active_rows as engine_rows
from rlhf_lightning.rollout.generators import kv_cache as engine_cache
from rlhf_lightning.rollout.generators.active_rows import Prefill
from rlhf_lightning.rollout.generators.base import CachedGenerator, TransformersGenerator
from tests.builders.models import PAD, prompt_batch
from tests.rollout.plain_generation import (
    NOISE,
    OTHER_MODELS,
    ROWS,
    SHAPE,
    STOPS,
    WINDOW,
    generated,
    other_model,
    recorded_forwards,
    tiny,
    without_cache,
)


@pytest.mark.thorough
@pytest.mark.parametrize("model_type", OTHER_MODELS)
def test_other_architectures_and_sliding_windows_give_the_tokens_of_the_plain_model(model_type):
    model = other_model(model_type)
    expected = without_cache(model, ROWS)
    assert max(len(ids) for ids in expected.values()) > WINDOW
    assert generated(model, prompt_batch(ROWS, width=10)) == expected


@pytest.mark.parametrize("engine", [CachedGenerator, TransformersGenerator])
@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
def test_temperature_0_takes_the_most_likely_token(engine, model_type):
    model = tiny(model_type)
    got = generated(model, prompt_batch(ROWS), temperature=0.0, engine=engine)
    for row, prompt in enumerate(ROWS):
        ids = list(prompt)
        while len(ids) < len(prompt) + 14 and (len(ids) == len(prompt) or ids[-1] not in STOPS):
            with torch.no_grad():
                ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        assert got[row] == ids[len(prompt) :], row


class NewName(LlamaForCausalLM):
    def forward(self, input_ids, cache=None, **options):
        return super().forward(input_ids, **{OWN_NAME: cache}, **options)


class OldName(LlamaForCausalLM):
    def forward(self, input_ids, past_key_values=None, **options):
        return super().forward(input_ids, **{OWN_NAME: past_key_values}, **options)


# transformers 5.24 renamed it; code beside a model's weights may have either
names = inspect.signature(LlamaForCausalLM.forward).parameters
OWN_NAME = next(name for name in ("cache", "past_key_values") if name in names)


@pytest.mark.parametrize("renamed", [NewName, OldName])
def test_the_cache_goes_by_the_name_that_the_models_forward_has(renamed):
    model = tiny()
    expected = without_cache(model, ROWS)
    model.__class__ = renamed
    assert generated(model, prompt_batch(ROWS)) == expected


def test_a_row_that_ended_is_never_computed_again():
    model, prompts = tiny(), prompt_batch(ROWS)
    with recorded_forwards(model) as shapes:
        got = generated(model, prompts)
    lengths = [len(ids) for ids in got.values()]
    assert len(set(lengths)) > 4
    still = [sum(length > t for length in lengths) for t in range(1, max(lengths))]
    assert [shape[0] for shape in shapes[-len(still) :]] == still
    assert sum(shape[0] for shape in shapes[: -len(still)]) == len(ROWS), "prompts are read once"


def test_samples_of_one_prompt_read_it_once_and_differ():
    rows = [row for row in ROWS[:4] for _ in range(5)]
    model = tiny()
    with recorded_forwards(model) as shapes:
        got = generated(model, prompt_batch(rows, width=11), max_new_tokens=2)
    read = sum(shape[0] for shape in shapes[:-1])
    assert read == 4, "four distinct prompts"
    assert shapes[-1][0] > 10, "but every sample is continued"
    assert len({tuple(ids) for ids in list(got.values())[:5]}) > 1
    assert generated(model, prompt_batch(rows)) == without_cache(model, rows)
    order = torch.randperm(len(rows))
    assert generated(model, prompt_batch(rows)[order]) == without_cache(model, rows)


def test_a_pad_id_inside_a_prompt_is_a_token_when_equal_prompts_are_found():
    rows = [[PAD, 5, 6], [5, 6], [PAD, PAD, 5, 6]]
    model = tiny()
    assert len(Prefill.of(prompt_batch(rows)).lengths) == 3
    assert generated(model, prompt_batch(rows)) == without_cache(model, rows)


@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
def test_prompts_read_in_many_forwards_give_the_same_tokens(model_type, monkeypatch):
    model, prompts = tiny(model_type), prompt_batch(ROWS)
    expected = generated(model, prompts)
    monkeypatch.setitem(engine_rows.PADDING_BUDGET, "cpu", 1)
    with recorded_forwards(model) as shapes:
        got = CachedGenerator(STOPS, PAD, prefill_tokens=16)(
            model, prompts, noise=NOISE, temperature=0.9, max_new_tokens=1
        )
    assert len(shapes) > 4
    assert max(rows * width for rows, width in shapes) <= 16
    body = got.sequences[:, prompts.input_ids.shape[1] :]
    assert body[:, 0].tolist() == [ids[0] for ids in expected.values()]
    assert generated(model, prompts) == expected


def test_room_that_grows_while_rows_leave_changes_no_token(monkeypatch):
    for model in (tiny("llama"), tiny("gpt2"), other_model("gemma3_text")):
        expected = without_cache(model, ROWS)
        for growth in (1, 3):
            monkeypatch.setattr(engine_cache, "GROWTH", growth)
            assert generated(model, prompt_batch(ROWS)) == expected


def test_memory_nobody_wrote_never_reaches_a_token():
    # Deterministic mode fills fresh memory with NaN, which attention would spread.
    model = tiny()
    expected = without_cache(model, ROWS)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(4).isnan().all(), "the premise"
        assert generated(model, prompt_batch(ROWS, width=12)) == expected
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_model_whose_state_is_no_key_value_cache_is_refused_with_what_to_use():
    config = AutoConfig.for_model(
        "lfm2", **(SHAPE | {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3})
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(TypeError, match="rollout=transformers"):
        generated(model, prompt_batch(ROWS))
