from __future__ import annotations

import pytest
import torch

from rlhf_lightning.models.cpu.attention import SUFFIX, one_token_attention
from rlhf_lightning.rollout.generators import active_rows as engine_rows
from rlhf_lightning.rollout.generators import base as generate
from rlhf_lightning.rollout.noise import sample_unchecked
from tests.builders.models import prompt_batch
from tests.rollout.plain_generation import NOISE, ROWS, generated, other_model, tiny


def test_the_models_attention_is_its_own_again_even_after_an_error():
    for model in (tiny(), other_model("gemma3_text")):
        before = model.config._attn_implementation
        with one_token_attention(model):
            assert model.config._attn_implementation == before + SUFFIX
        with pytest.raises(IndexError), one_token_attention(model):
            model(input_ids=torch.tensor([[10_000]]))
        assert model.config._attn_implementation == before
        generated(model, prompt_batch(ROWS))
        assert model.config._attn_implementation == before


def test_attention_that_is_not_torchs_own_is_left_alone():
    model = tiny()
    expected = generated(model, prompt_batch(ROWS))
    model.set_attn_implementation("eager")
    with one_token_attention(model) as used:
        assert not used
        assert model.config._attn_implementation == "eager"
    assert generated(model, prompt_batch(ROWS)) == expected


@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_in_bf16_the_engine_is_as_close_to_float32_as_the_plain_forward(
    model_type, weights, monkeypatch
):
    model, prompts = tiny(model_type), prompt_batch(ROWS)
    exact = tiny(model_type)
    exact.load_state_dict(model.to(weights).state_dict())
    seen: list[torch.Tensor] = []

    def recorded(logits, uniform, *, temperature):
        seen.append(logits.float())
        return sample_unchecked(logits, uniform, temperature=temperature)

    monkeypatch.setattr(generate, "sample_unchecked", recorded)
    monkeypatch.setitem(engine_rows.PADDING_BUDGET, "cpu", 0)  # prompts of one token are read alone
    engine = generate.CachedGenerator([], 0)  # nobody stops, so rows keep their order
    with torch.autocast("cpu", torch.bfloat16, enabled=weights == torch.float32):
        result = engine(model, prompts, noise=NOISE, temperature=1.0, max_new_tokens=6)
        order = sorted(range(len(ROWS)), key=lambda row: (len(ROWS[row]), ROWS[row]))
        errors: dict[str, list[float]] = {"ours": [], "plain": []}
        for slot, row in enumerate(order):
            ids = result.sequences[row, prompts.input_ids.shape[1] - len(ROWS[row]) :].unsqueeze(0)
            with torch.no_grad():
                plain = model(input_ids=ids).logits[0].float()
                with torch.autocast("cpu", enabled=False):
                    wanted = exact(input_ids=ids).logits[0]
            for t in range(6):
                at = len(ROWS[row]) - 1 + t
                errors["ours"].append(float((seen[t][slot] - wanted[at]).square().mean()))
                errors["plain"].append(float((plain[at] - wanted[at]).square().mean()))
    ours, plain = (sum(errors[name]) / len(errors[name]) for name in ("ours", "plain"))
    assert 0 < ours < 1.5 * plain
    assert plain < 0.01 * float(wanted.var()), "the premise: an error of rounding"
