from __future__ import annotations

import pytest
import torch

from rlhf_lightning.rollout.generators import cuda_graphs as engine_cuda_graphs
from rlhf_lightning.rollout.generators.cuda_graphs import CudaGraphsGenerator
from tests.builders.models import MODEL_TYPES, PAD, prompt_batch
from tests.rollout.plain_generation import NOISE, ROWS, STOPS, generated, other_model, tiny


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


def test_weights_that_diverged_are_an_error_though_no_step_waits_for_them():
    model = tiny()
    torch.nn.init.constant_(model.lm_head.weight[3], float("nan"))

    def engine(stop_ids, pad_token_id):
        return CudaGraphsGenerator([], pad_token_id, check_every=100, capture=False)

    with pytest.raises(ValueError, match="logits are not finite"):
        generated(model, prompt_batch(ROWS), engine=engine)


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
