"""Captured decoding; where there is no GPU, its steps one kernel at a time."""

from __future__ import annotations

import pickle
import warnings
from functools import partial
from itertools import pairwise

import pytest
import torch
from transformers import AutoConfig

from rlhf_lightning.hparams import LoraHparams
from rlhf_lightning.models.attention import attention_backends, expect_varying_shapes
from rlhf_lightning.models.factory import load_base
from rlhf_lightning.models.gpu_kernels import fuse_layers, gpu_kernels
from rlhf_lightning.models.lora import add_policy
from rlhf_lightning.models.precision import in_precision
from rlhf_lightning.preferences.candidates import Decoding, TruncatedGenerator
from rlhf_lightning.rollout.generators import captured, captured_step
from rlhf_lightning.rollout.generators.base import CachedGenerator
from rlhf_lightning.rollout.generators.captured import CapturedGenerator, why_not_captured
from tests.builders.cpu_graphs import CpuGraph
from tests.builders.models import MODEL_TYPES, PAD, config_fields, prompt_batch
from tests.rollout.plain_generation import NOISE, ROWS, STOPS, generated, other_model, tiny

LLAMAS = ("llama", "qwen2", "qwen3")
Steps = partial(CapturedGenerator, capture=False)


def rows_of(result, width: int) -> list[list[int]]:
    body = result.sequences[:, width:]
    return [ids[mask].tolist() for ids, mask in zip(body, result.response_mask, strict=True)]


def call(engine, model, prompts, *, temperature=0.9, max_new_tokens=14):
    return engine(
        model, prompts, noise=NOISE, temperature=temperature, max_new_tokens=max_new_tokens
    )


@pytest.mark.parametrize(
    ("model_type", "check_every"),
    [*((name, 3) for name in sorted({*MODEL_TYPES, *LLAMAS})), ("llama", 1), ("llama", 100)],
)
def test_the_steps_give_the_tokens_of_the_cached_generator(model_type, check_every, monkeypatch):
    monkeypatch.setattr(captured_step, "COLUMNS", 6)  # grow four times
    monkeypatch.setattr(captured, "COLUMNS", 6)
    model, rows = tiny(model_type), [*ROWS, *ROWS[:3]]
    engine = partial(Steps, check_every=check_every)
    expected = generated(model, prompt_batch(rows))
    assert generated(model, prompt_batch(rows, width=10), engine=engine) == expected
    assert generated(model, prompt_batch(rows), engine=engine) == expected


def test_a_watcher_is_given_the_first_tokens_again_and_again():
    model, prompts, seen = tiny("llama"), prompt_batch(ROWS[:2]), []
    engine = Steps((), PAD, check_every=3)
    engine.watch = lambda tokens: seen.append(tokens.tolist())
    result = call(engine, model, prompts)
    written = result.sequences[:, prompts.input_ids.shape[1] :]
    assert seen == [written[:, :t].tolist() for t in (3, 6, 9, 12)]


@pytest.mark.parametrize("model_type", ["gpt2", *LLAMAS])
def test_log_probabilities_are_those_of_the_cached_generator(model_type):
    model, prompts = tiny(model_type), prompt_batch(ROWS)
    expected = call(CachedGenerator(STOPS, PAD), model, prompts)
    got = call(Steps(STOPS, PAD), model, prompts)
    torch.testing.assert_close(got.logprobs, expected.logprobs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("way", ["auto", "torch"])
def test_llamas_layers_run_in_few_kernels_unless_the_plain_ones_are_asked_for(way, fused):
    model, engine = tiny("llama"), Steps(STOPS, PAD)
    expected = generated(model, prompt_batch(ROWS))
    if fused:  # as on a GPU
        fuse_layers(model, liger=False)
    with gpu_kernels(way):
        assert generated(model, prompt_batch(ROWS), engine=lambda *_: engine) == expected
    assert engine._engine is not None
    assert engine._engine.step is not None
    assert (engine._engine.step.llama is not None) == (way == "auto")


@pytest.mark.parametrize("model_type", LLAMAS)
def test_in_bf16_the_steps_are_as_near_to_fp32_as_the_cached_generator_is(model_type):
    model, prompts = tiny(model_type), prompt_batch(ROWS)
    exact = call(CachedGenerator((), PAD), model, prompts, max_new_tokens=1)
    with in_precision("bf16-mixed", torch.device("cpu")):
        plain = call(CachedGenerator((), PAD), model, prompts, max_new_tokens=8)
        steps = call(Steps((), PAD), model, prompts, max_new_tokens=8)
    assert steps.logprobs.shape == plain.logprobs.shape
    # Until a first token differs, both saw the same ones; where rounding flips it is the CPU's.
    width = prompts.input_ids.shape[1]
    same = (plain.sequences[:, width:] == steps.sequences[:, width:]).long().cumprod(1).bool()
    assert same.float().mean() > 0.5
    distance = (plain.logprobs[:, :1] - exact.logprobs).abs().mean()
    difference = (plain.logprobs - steps.logprobs)[same].abs().mean()
    assert 0 < difference < 2 * distance


@pytest.fixture
def graphs(monkeypatch) -> list[CpuGraph]:
    """Let captures be made on a CPU; return those that there were."""
    made: list[CpuGraph] = []

    def captured_on_a_cpu(step, pool):
        state = [x for x in vars(step).values() if isinstance(x, torch.Tensor)]
        caches = [x for layer in step.in_place.in_place for x in (layer.keys, layer.values)]
        for counter in (step.t, step.column):  # the next token may be one too many
            counter.sub_(1)
        made.append(CpuGraph(step, [*state, *caches]))
        for counter in (step.t, step.column):
            counter.add_(1)
        return made[-1]

    monkeypatch.setattr(captured, "_captured", captured_on_a_cpu)
    monkeypatch.setattr(captured, "_on_another_stream", lambda step: step())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(CapturedGenerator, "_captures", lambda *_: True)
    return made


@pytest.mark.parametrize("model_type", ["gpt2", *LLAMAS])
def test_graphs_are_captured_once_and_give_the_bits_of_the_steps(model_type, graphs, monkeypatch):
    monkeypatch.setattr(captured_step, "COLUMNS", 8)
    monkeypatch.setattr(captured, "COLUMNS", 8)
    model, prompts = tiny(model_type), prompt_batch([*ROWS, *ROWS[:3]], width=10)
    engine, steps = (CapturedGenerator(STOPS, PAD, check_every=2, capture=c) for c in (None, False))
    counts = []
    for number in range(3):
        with torch.no_grad():  # as an optimizer does
            for parameter in model.parameters():
                parameter.mul_(1.02)
        noise = NOISE.at_iteration(number)
        got, expected = (
            one(model, prompts, noise=noise, temperature=0.9, max_new_tokens=14)
            for one in (engine, steps)
        )
        assert torch.equal(got.sequences, expected.sequences)
        assert torch.equal(got.logprobs, expected.logprobs)
        counts.append(len(graphs))
    assert counts[0] >= 3, "of other rows and columns"
    assert engine._engine is not None
    assert list(engine._engine.graphs.values()) == graphs, "each shape once"


def test_graphs_follow_moved_weights_adapters_and_sampling(graphs, tmp_path):
    tiny("llama").save_pretrained(tmp_path)
    policy = add_policy(load_base(tmp_path, LoraHparams(r=4)), "policy", seed=1)
    for parameter in policy.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    prompts, seen = prompt_batch(ROWS), []
    engine = TruncatedGenerator((), PAD, decoding=Decoding())
    steps = TruncatedGenerator((), PAD, decoding=Decoding())
    steps.capture = False

    def same(model, temperature=0.9) -> None:
        got, expected = (call(e, model, prompts, temperature=temperature) for e in (engine, steps))
        assert torch.equal(got.logprobs, expected.logprobs)
        seen.append(got.sequences)
        assert len(graphs) == len(seen), "captured anew, of one shape"

    model = policy.base.model
    with torch.no_grad(), policy.base.activated(None):
        same(model)
    with torch.no_grad(), policy.generating():
        same(model)
        same(model, temperature=0.5)
        engine.decoding = steps.decoding = Decoding(top_k=2)
        same(model)
        for parameter in model.parameters():
            parameter.data = parameter.data * 1.1  # elsewhere
        same(model)
    assert all(not torch.equal(a, b) for a, b in pairwise(seen))


def test_one_engine_serves_changed_weights_sizes_and_settings(graphs, monkeypatch):
    monkeypatch.setattr(captured_step, "COLUMNS", 6)
    monkeypatch.setattr(captured, "COLUMNS", 6)
    model, engine = tiny("llama"), CapturedGenerator(STOPS, PAD, check_every=2)
    rows = [*ROWS, *ROWS[:3]]
    for count, width, length in ((15, 12, 14), (5, 9, 20), (15, 8, 3), (13, 10, 14)):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.02)
        for temperature in (0.9, 0.5):
            prompts = prompt_batch(rows[:count], width=width)
            how = {"temperature": temperature, "max_new_tokens": length}
            expected = call(CachedGenerator(STOPS, PAD), model, prompts, **how)
            assert rows_of(call(engine, model, prompts, **how), width) == rows_of(expected, width)
    other = tiny("qwen2")
    assert generated(other, prompt_batch(ROWS), engine=lambda *_: engine) == generated(
        other, prompt_batch(ROWS)
    )


def test_an_engine_that_validation_made_serves_training():
    model, engine = tiny("llama"), Steps(STOPS, PAD)
    expected = generated(model, prompt_batch(ROWS))
    with torch.inference_mode():
        assert generated(model, prompt_batch(ROWS), engine=lambda *_: engine) == expected
    assert generated(model, prompt_batch(ROWS), engine=lambda *_: engine) == expected


def test_an_engine_pickles_without_its_buffers():
    model, engine = tiny("llama"), Steps(STOPS, PAD)
    expected = generated(model, prompt_batch(ROWS), engine=lambda *_: engine)
    again = pickle.loads(pickle.dumps(engine))
    assert len(pickle.dumps(engine)) < 2000
    assert generated(model, prompt_batch(ROWS), engine=lambda *_: again) == expected


def test_adapters_are_decoded(tmp_path):
    tiny("llama").save_pretrained(tmp_path)
    policy = add_policy(load_base(tmp_path, LoraHparams(r=4)), "policy", seed=1)
    for parameter in policy.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    prompts = prompt_batch(ROWS)
    with policy.generating() as model, torch.no_grad():
        expected = rows_of(call(CachedGenerator(STOPS, PAD), model, prompts), 8)
        assert rows_of(call(Steps(STOPS, PAD), model, prompts), 8) == expected
    with policy.base.activated(None):
        plain = generated(policy.base.model, prompts)
    assert list(plain.values()) != expected, "the adapter changes nothing"


@pytest.mark.parametrize("decoding", [Decoding(top_k=3), Decoding(top_p=0.5, temperature=0.7)])
def test_candidates_are_truncated_inside_the_step(decoding):
    model, prompts = tiny("llama"), prompt_batch(ROWS)
    results = []
    for capture in (None, False):  # eager on a CPU, steps
        engine = TruncatedGenerator(STOPS, PAD, decoding=decoding)
        engine.capture = capture
        result = call(engine, model, prompts, temperature=decoding.temperature)
        results.append(rows_of(result, 8))
    assert results[0] == results[1]
    assert results[0] != list(generated(model, prompts, temperature=decoding.temperature).values())


def test_weights_that_diverged_are_an_error_and_leave_nothing_behind():
    model, engine = tiny("llama"), Steps((), PAD, check_every=100)
    good = generated(model, prompt_batch(ROWS), engine=lambda *_: engine)
    kept = model.lm_head.weight[3].clone()
    torch.nn.init.constant_(model.lm_head.weight[3], float("nan"))
    with pytest.raises(ValueError, match="not finite"):
        generated(model, prompt_batch(ROWS), engine=lambda *_: engine)
    with torch.no_grad():
        model.lm_head.weight[3] = kept
    assert generated(model, prompt_batch(ROWS), engine=lambda *_: engine) == good


def test_what_cannot_be_captured_is_decoded_token_by_token_or_refused():
    prompts = prompt_batch(ROWS)
    with pytest.raises(ValueError, match=r"capture=true.*cpu"):
        generated(tiny(), prompts, engine=partial(CapturedGenerator, capture=True))
    with pytest.raises(TypeError, match="sliding windows of 5"):
        generated(other_model("mistral"), prompts, engine=Steps)
    eager = tiny()
    eager.set_attn_implementation("eager")
    with pytest.raises(TypeError, match="'eager'"):
        generated(eager, prompts, engine=Steps)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert generated(eager, prompts, engine=CapturedGenerator) == generated(eager, prompts)


def test_the_reason_against_a_capture_is_read_from_the_config():
    def reason(**changes) -> str | None:
        return why_not_captured(AutoConfig.for_model(**config_fields("llama", **changes)))

    scaled = {"rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 64}
    assert reason() is None
    assert reason(rope_parameters=scaled | {"rope_type": "linear"}) is None
    assert "rotary" in str(reason(rope_parameters=scaled | {"rope_type": "dynamic"}))
    experts = AutoConfig.for_model("qwen3_moe", num_hidden_layers=2)
    assert "experts" in str(why_not_captured(experts))
    mistral = AutoConfig.for_model("mistral", sliding_window=64)
    assert why_not_captured(mistral, columns=64) is None
    assert "64" in str(why_not_captured(mistral, columns=65))


def asked_of_torch(model, prompts) -> list[tuple[int, bool]]:
    """Return the query lengths of each attention, and whether cuDNN was allowed for it."""
    asked = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def watched(query, *args, **kwargs):
        asked.append((query.shape[2], torch.backends.cuda.cudnn_sdp_enabled()))
        return attend(query, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
        call(Steps(STOPS, PAD), model, prompts)
        steps = len(asked)
        model(input_ids=prompts.input_ids, use_cache=False)
    assert 0 < steps < len(asked)
    return asked


@pytest.fixture
def cudnn():
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    yield
    torch.backends.cuda.enable_cudnn_sdp(before)


@pytest.mark.parametrize("way", ["auto", "torch"])
@pytest.mark.parametrize("model_type", ["gpt2", "qwen2"])
def test_cudnn_attention_is_for_steps_of_fixed_shape_alone(model_type, way, cudnn):
    with attention_backends(way):
        asked = asked_of_torch(tiny(model_type, attn_implementation="sdpa"), prompt_batch(ROWS))
        steps = {allowed for length, allowed in asked if length <= 2}
        others = {allowed for length, allowed in asked if length > 2}
    assert steps == {True}
    assert others == {way == "torch"}


def test_a_choice_of_the_user_stands(cudnn):
    torch.backends.cuda.enable_cudnn_sdp(False)
    with attention_backends("torch"):
        asked = asked_of_torch(tiny("gpt2", attn_implementation="sdpa"), prompt_batch(ROWS))
    assert {allowed for _, allowed in asked} == {False}
    with pytest.raises(ValueError, match="attention_backends='cudnn'"):
        attention_backends("cudnn").__enter__()
    expect_varying_shapes()


@pytest.mark.gpu
@pytest.mark.parametrize("model_type", sorted({*MODEL_TYPES, *LLAMAS}))
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_captured_graphs_give_the_bits_of_the_same_steps_without_a_capture(
    model_type, precision, monkeypatch
):
    monkeypatch.setattr(captured_step, "COLUMNS", 16)
    monkeypatch.setattr(captured, "COLUMNS", 16)
    model = tiny(model_type).cuda()
    engine, steps = CapturedGenerator(STOPS, PAD, check_every=4), Steps(STOPS, PAD, check_every=4)
    for count in (12, 5, 12):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.02)
        prompts = prompt_batch(ROWS[:count]).to("cuda")
        with in_precision(precision, torch.device("cuda")):
            got, expected = (call(one, model, prompts) for one in (engine, steps))
            plain = call(CachedGenerator(STOPS, PAD), model, prompts)
        assert torch.equal(got.sequences, expected.sequences)
        assert torch.equal(got.logprobs, expected.logprobs)
        if precision == "32-true":
            assert rows_of(got, 8) == rows_of(plain, 8)
