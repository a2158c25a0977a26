from __future__ import annotations

import importlib.util

import pytest
import torch

from rlhf_lightning.rollout.generators.vllm import VllmGenerator
from rlhf_lightning.rollout.noise import RowNoise
from tests.builders.models import EOS, PAD, prompt_batch, prompt_rows, tiny_policy

INSTALLED = importlib.util.find_spec("vllm") is not None
ROWS = prompt_rows([3, 8, 5, 6])


@pytest.mark.skipif(INSTALLED, reason="vLLM is installed")
def test_without_vllm_the_error_says_what_to_install_and_what_to_use_instead():
    with pytest.raises(ImportError, match=r"-e '\.\[vllm\]' in the checkout, or use rollout=cach"):
        VllmGenerator([EOS], PAD)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not INSTALLED, reason="vLLM is not installed")
@pytest.mark.parametrize("tied", [False, True])
def test_vllm_samples_from_the_weights_of_now_and_notices_when_it_does_not(tied):
    # Heads of 64: vLLM's kernels know no smaller ones.
    model = tiny_policy(
        "llama",
        hidden_size=128,
        num_attention_heads=2,
        tie_word_embeddings=tied,
        max_position_embeddings=128,
    ).model.cuda()
    prompts = prompt_batch(ROWS).to("cuda")
    engine = VllmGenerator([EOS], PAD, engine={"enforce_eager": True, "max_model_len": 64})

    def generated():
        return engine(model, prompts, noise=RowNoise(1), temperature=1.0, max_new_tokens=8)

    first = generated()
    assert torch.equal(first.sequences, generated().sequences), "a row's seed is its noise's"
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.3)
    with pytest.raises(RuntimeError, match="some weight has not arrived"):
        engine.check_weights(model, ROWS)
    assert not torch.equal(first.sequences, generated().sequences)
