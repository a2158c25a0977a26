"""What makes the cached generator fast changes no token."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from rlhf_lightning.rollout import engine_cache, engine_cuda_graphs, engine_rows
from rlhf_lightning.rollout.engine_cuda_graphs import CudaGraphsGenerator
from rlhf_lightning.rollout.engine_prefill import Prefill, equal_widths
from rlhf_lightning.rollout.engine_weights import linear_weights_prepared
from rlhf_lightning.rollout.generate import CachedGenerator, TransformersGenerator
from rlhf_lightning.rollout.noise import RowNoise, sample
from tests.tiny import (
    EOS,
    HIDDEN,
    MODEL_TYPES,
    PAD,
    VOCABULARY,
    prompt_batch,
    prompt_rows,
    tiny_policy,
)

ROWS = prompt_rows([3, 8, 1, 5, 8, 2, 7, 4, 6, 3, 1, 8])
STOPS = (EOS, *range(42, VOCABULARY))
NOISE = RowNoise(seed=7, iteration=3)
WINDOW = 5  # shorter than most prompts and than what follows them

_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "pad_token_id": None,
}
_MIXED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
OTHER_MODELS = {
    "gemma": {},
    "gemma2": _MIXED,
    "gemma3_text": _MIXED,
    "qwen2": {},
    "qwen3": _MIXED | {"use_sliding_window": True},
    "mistral": {"sliding_window": WINDOW},
    "phi3": {"sliding_window": WINDOW},
}


def other_model(model_type: str):
    config = AutoConfig.for_model(model_type, **(_SHAPE | OTHER_MODELS[model_type]))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def tiny(model_type: str = "llama", **changes):
    return tiny_policy(model_type, **changes).model.eval()


def generated(
    model, prompts, *, temperature: float = 0.9, max_new_tokens: int = 14, engine=CachedGenerator
):
    """Return each row's response ids by its row id."""
    result = engine(STOPS, PAD)(
        model, prompts, noise=NOISE, temperature=temperature, max_new_tokens=max_new_tokens
    )
    body = result.sequences[:, prompts.input_ids.shape[1] :]
    rows = [ids[mask].tolist() for ids, mask in zip(body, result.response_mask, strict=True)]
    return dict(zip(prompts.row_ids.tolist(), rows, strict=True))


def without_cache(model, rows, *, temperature: float = 0.9, max_new_tokens: int = 14):
    """Return what a full forward for every token of every row gives: nothing clever."""
    responses = {}
    for row, prompt in enumerate(rows):
        ids = list(prompt)
        for t in range(max_new_tokens):
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[:, -1]
            uniform = NOISE.uniform(torch.tensor([row]), t)
            ids.append(int(sample(logits, uniform, temperature=temperature)))
            if ids[-1] in STOPS:
                break
        responses[row] = ids[len(prompt) :]
    return responses


@contextmanager
def recorded_forwards(model) -> Iterator[list[torch.Size]]:
    """Yield the shapes `[rows, new tokens]` of the model's forwards."""
    shapes: list[torch.Size] = []
    hook = model.register_forward_pre_hook(
        lambda _, __, kwargs: shapes.append(kwargs["input_ids"].shape), with_kwargs=True
    )
    try:
        yield shapes
    finally:
        hook.remove()


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


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_prompts_read_in_many_forwards_give_the_same_tokens(model_type, monkeypatch):
    model, prompts = tiny(model_type), prompt_batch(ROWS)
    expected = generated(model, prompts)
    monkeypatch.setitem(engine_rows.WASTE, "cpu", 1)
    with recorded_forwards(model) as shapes:
        got = CachedGenerator(STOPS, PAD, prefill_tokens=16)(
            model, prompts, noise=NOISE, temperature=0.9, max_new_tokens=1
        )
    assert len(shapes) > 4
    assert max(rows * width for rows, width in shapes) <= 16
    body = got.sequences[:, prompts.input_ids.shape[1] :]
    assert body[:, 0].tolist() == [ids[0] for ids in expected.values()]
    assert generated(model, prompts) == expected


def test_runs_of_like_length_cover_every_prompt_within_the_budget():
    lengths = sorted([3, 3, 4, 9, 9, 10, 31, 32, 32, 64, 65, 200])
    for waste, budget in [(0, 10**6), (10, 128), (10**6, 64), (10**6, 10**6)]:
        runs = equal_widths(lengths, waste=waste, budget=budget)
        assert sorted(i for run in runs for i in run) == list(range(len(lengths)))
        for run in runs:
            width = max(lengths[i] for i in run)
            assert len(run) * width <= budget or len(run) == 1
            assert sum(width - lengths[i] for i in run) <= waste
    assert len(equal_widths(lengths, waste=10**6, budget=10**6)) == 1


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


def test_a_token_is_written_in_place_and_copies_nothing_before_it():
    layer = engine_cache.InPlaceLayer()
    layer.slots, layer.columns, layer.rows = 3, 12, 3
    first = torch.randn(3, 2, 4, 8)
    keys, _ = layer.update(first, first)
    storage = keys.untyped_storage().data_ptr()
    for t in range(5):
        token = torch.randn(3, 2, 1, 8)
        keys, values = layer.update(token, -token)
        assert keys.untyped_storage().data_ptr() == storage
        assert keys.shape[2] == values.shape[2] == 5 + t
        assert torch.equal(keys[:, :, -1:], token)
        assert torch.equal(values[:, :, -1:], -token)
        assert torch.equal(keys[:, :, :4], first)


def test_a_model_whose_state_is_no_key_value_cache_is_refused_with_what_to_use():
    config = AutoConfig.for_model(
        "lfm2", **(_SHAPE | {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3})
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(TypeError, match="rollout=transformers"):
        generated(model, prompt_batch(ROWS))


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_prepared_weights_give_the_layers_own_products_in_both_precisions(model_type):
    model = tiny(model_type)
    ids = torch.tensor(prompt_rows([9] * 6))
    for context, tolerance in ((torch.autocast("cpu", torch.bfloat16), 2e-2), (None, 1e-5)):
        with torch.no_grad(), context or torch.autocast("cpu", enabled=False):
            expected = model(input_ids=ids).logits.float()
            with linear_weights_prepared(model, rows=6):
                got = model(input_ids=ids).logits.float()
        assert (got - expected).abs().max() <= tolerance * expected.abs().max()


class _Casts(TorchDispatchMode):
    """Count casts of tensors with `numel` elements."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.numel, self.count = numel, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._to_copy.default and args[0].numel() == self.numel:
            self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("frozen", [False, True])
def test_a_weight_is_cast_once_a_generation_frozen_or_not(frozen):
    # Autocast never keeps the cast of a frozen weight: the base of LoRA would be cast every token.
    model = tiny(intermediate_size=61).requires_grad_(not frozen)
    casts = _Casts(61 * HIDDEN)
    with torch.autocast("cpu", torch.bfloat16), casts:
        generated(model, prompt_batch(ROWS))
    assert casts.count <= 3 * 2, "gate, up and down of two layers"


def test_layers_and_weights_are_as_before_even_after_an_error():
    model = tiny("gpt2")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    wrong = torch.tensor([[VOCABULARY]])
    with pytest.raises(IndexError), linear_weights_prepared(model, rows=1):
        model(input_ids=wrong)
    generated(model, prompt_batch(ROWS))
    assert not any("forward" in vars(module) for module in model.modules())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.requires_grad for p in model.parameters())


def test_an_update_between_two_generations_is_seen():
    model, other, prompts = tiny(), tiny(seed=5), prompt_batch(ROWS)
    assert generated(model, prompts) != generated(other, prompts)
    with torch.no_grad():
        for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
            ours.copy_(theirs)
    assert generated(model, prompts) == generated(other, prompts)


def test_active_adapters_are_part_of_the_policy():
    model = tiny()
    plain = generated(model, prompt_batch(ROWS))
    config = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    torch.manual_seed(0)
    inject_adapter_in_model(config, model)
    got = generated(model.eval(), prompt_batch(ROWS))
    assert got != plain
    assert got == without_cache(model, ROWS)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
@pytest.mark.parametrize("check_every", [1, 3, 100])
def test_the_steps_that_cuda_graphs_hold_give_the_same_tokens(model_type, check_every, monkeypatch):
    # Without the capture, which needs a GPU; the columns grow four times.
    monkeypatch.setattr(engine_cuda_graphs, "COLUMNS", 6)
    model, rows = tiny(model_type), [*ROWS, *ROWS[:3]]

    def engine(stop_ids, pad_token_id):
        return CudaGraphsGenerator(stop_ids, pad_token_id, check_every=check_every, capture=False)

    got = generated(model, prompt_batch(rows, width=10), engine=engine)
    assert got == generated(model, prompt_batch(rows))
    assert got == generated(model, prompt_batch(rows), engine=engine)


@pytest.mark.gpu
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_captured_graphs_give_the_tokens_of_the_cached_generator(model_type, monkeypatch):
    monkeypatch.setattr(engine_cuda_graphs, "COLUMNS", 6)
    model, prompts = tiny(model_type).cuda(), prompt_batch(ROWS).to("cuda")
    expected = generated(model, prompts)
    for check_every in (1, 4):
        engine = CudaGraphsGenerator(STOPS, PAD, check_every=check_every)
        result = engine(model, prompts, noise=NOISE, temperature=0.9, max_new_tokens=14)
        body = result.sequences[:, prompts.input_ids.shape[1] :]
        for row, (ids, mask) in enumerate(zip(body, result.response_mask, strict=True)):
            assert ids[mask].tolist() == expected[row]


def test_cuda_graphs_refuse_what_they_cannot_hold_and_name_what_can():
    prompts = prompt_batch(ROWS)
    with pytest.raises(ValueError, match=r"needs a CUDA device.*rollout=cached"):
        generated(tiny(), prompts, engine=CudaGraphsGenerator)

    def engine(stop_ids, pad_token_id):
        return CudaGraphsGenerator(stop_ids, pad_token_id, capture=False)

    with pytest.raises(TypeError, match=r"sliding windows of \[5\].*rollout=cached"):
        generated(other_model("mistral"), prompts, engine=engine)
    eager = tiny()
    eager.set_attn_implementation("eager")
    with pytest.raises(TypeError, match=r"got 'eager': use rollout=cached"):
        generated(eager, prompts, engine=engine)
