"""Every common architecture goes through the three stages, loaded from a folder like a hub model.

Small random models are written by plain transformers beside a tokenizer whose pad token is its own,
is EOS, or is missing.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from rlhf_lightning.data.collate import PreferenceCollator, PromptCollator, SFTCollator
from rlhf_lightning.data.records import DemonstrationRecord, PreferenceRecord, PromptRecord
from rlhf_lightning.hparams import LoraHparams, RewardHparams, SamplingHparams, SFTHparams
from rlhf_lightning.models.factory import load_policy, load_scalar_model
from rlhf_lightning.models.forward import response_statistics, sequence_scores
from rlhf_lightning.models.ppo_models import ppo_models
from rlhf_lightning.modules.export import save_hf_model
from rlhf_lightning.modules.optimization import Schedule
from rlhf_lightning.modules.reward import RewardModule
from rlhf_lightning.modules.sft import SFTModule
from rlhf_lightning.rollout.generators.base import CachedGenerator
from rlhf_lightning.rollout.scorers.base import RewardModelScorer
from rlhf_lightning.text.tokenizers import load_tokenizer, stop_ids
from tests.builders.encoding import encode_all
from tests.builders.models import (
    EOS,
    LLAMA_LIKE,
    config_fields,
    flat_parameters,
    prompt_rows,
    tiny_tokenizer,
)
from tests.builders.stages import RecordedPPO, TokenScorer, adamw, ppo_hparams, trainer
from tests.models.test_forward import padded

pytestmark = pytest.mark.filterwarnings("ignore:.*have no `val_dataloader`.*")

_NEW = LLAMA_LIKE | {"num_attention_heads": 4, "num_key_value_heads": 2}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
# What sets each apart beyond its name: see the comments.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "gpt2": config_fields("gpt2", attn_pdrop=0.1, resid_pdrop=0.1, embd_pdrop=0.1),
    "gpt_neox": config_fields("gpt_neox", use_parallel_residual=True, hidden_dropout=0.1),
    "opt": config_fields("opt", dropout=0.1),
    # as in OPT-350M: embeddings narrower than the decoder, norms behind the blocks, none at the end
    "opt_projected": config_fields(
        "opt", word_embed_proj_dim=16, do_layer_norm_before=False, dropout=0.1
    ),
    # as Llama 3: scaled rotary angles, several ids that end an answer
    "llama": _NEW | {"model_type": "llama", "rope_scaling": LLAMA3, "eos_token_id": [EOS, 5, 6]},
    "qwen2": _NEW | {"model_type": "qwen2", "tie_word_embeddings": True},  # biased q, k, v
    # heads wider than hidden_size / num_attention_heads, normed queries and keys
    "qwen3": _NEW | {"model_type": "qwen3", "tie_word_embeddings": True, "head_dim": 16},
    "gemma": _NEW | {"model_type": "gemma", "head_dim": 16},  # scaled embeddings
    # sliding windows narrower than a row, in every other layer
    "gemma3_text": _NEW
    | {
        "model_type": "gemma3_text",
        "head_dim": 16,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    # capped logits of the head and of attention, low enough that most of them feel it
    "gemma2": _NEW
    | {
        "model_type": "gemma2",
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "final_logit_softcapping": 3.0,
        "attn_logit_softcapping": 2.0,
        "sliding_window": 8,
    },
}
# Every architecture with pad == eos, where a wrong mask shows, and one with every kind of pad.
RUNS = [(name, "eos") for name in ARCHITECTURES] + [("llama", "own"), ("llama", "missing")]


def hub_model(folder: Path, name: str, *, pad: str = "eos", **changes: Any) -> Path:
    """Write a random model and a tokenizer as somebody else would publish them."""
    fields = ARCHITECTURES.get(name, {}) | changes
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields))
    model.generation_config = GenerationConfig(eos_token_id=fields["eos_token_id"])
    model.save_pretrained(folder)
    tokenizer = tiny_tokenizer(pad_is_eos=pad == "eos")
    if pad == "missing":
        tokenizer.pad_token = None
    tokenizer.save_pretrained(folder)
    return folder


def words(ids: list[int]) -> str:
    return " ".join(f"w{i}" for i in ids)


PROMPTS = [words(ids) for ids in prompt_rows((3, 8, 1, 5, 7, 2, 9, 4), seed=1)]
GOOD = [words(ids) for ids in prompt_rows((4, 2, 1, 9, 6, 1, 7, 3), seed=2)]
BAD = [words(ids) for ids in prompt_rows((3, 9, 2, 6, 8, 4, 2, 4), seed=3)]


def encoded(records: list[Any], tokenizer: Any) -> list[Any]:
    rows, report = encode_all(records, tokenizer, max_length=40)
    assert not report.dropped
    return rows


def fit(module: Any, batch: Any, *, steps: int) -> list[float]:
    """Train on one batch; return what `training_step` logged as its loss."""
    losses: list[float] = []
    log = module.log_dict

    def keep(values: Any, **options: Any) -> None:
        losses.extend(float(v) for k, v in values.items() if k in ("sft/loss", "reward/loss"))
        log(values, **options)

    module.log_dict = keep
    trainer(limit_val_batches=0).fit(module, DataLoader([batch] * steps, batch_size=None))
    return losses


@pytest.mark.parametrize(("name", "pad"), RUNS)
def test_logprobs_are_those_of_the_plain_checkpoint(tmp_path, name, pad):
    folder = hub_model(tmp_path, name, pad=pad)
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.pad_token_id == tokenizer.eos_token_id) == (pad != "own")
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    plain.eval()
    policy = load_policy(folder)
    lengths = (9, 17, 4, 21)
    prompts = [3, 8, 1, 12]
    rows = [[*ids[:-1], EOS] for ids in prompt_rows(lengths, seed=4)]
    pairs = list(zip(rows, prompts, strict=True))
    batch = padded(
        [ids[:n] for ids, n in pairs], [ids[n:] for ids, n in pairs], pad=tokenizer.pad_token_id
    )
    with torch.no_grad():
        got = response_statistics(policy, batch, temperature=1.0).logprobs
        for row, (ids, n) in enumerate(pairs):
            logits = plain(input_ids=torch.tensor([ids])).logits[0]
            expected = logits.log_softmax(-1)[torch.arange(n - 1, len(ids) - 1), ids[n:]]
            torch.testing.assert_close(got[row, : len(ids) - n], expected, rtol=0, atol=2e-5)
    assert got[batch.response_mask].std() > 0.3, "all alike would prove nothing"


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "pad"), RUNS)
def test_sft_reward_model_and_ppo_run_one_from_the_other(tmp_path, name, pad):
    sft_folder, reward_folder = tmp_path / "sft", tmp_path / "reward"
    start = hub_model(tmp_path / "hub", name, pad=pad)
    tokenizer = load_tokenizer(start)
    stops, pad_id = stop_ids(tokenizer, start), int(tokenizer.pad_token_id)
    assert stops == ((EOS, 5, 6) if name == "llama" else (EOS,))
    common: dict[str, Any] = {"optimizer": adamw, "schedule": Schedule("constant")}

    sft = SFTModule(
        sft=SFTHparams(learning_rate=2e-3), policy=partial(load_policy, start), **common
    )
    records = [DemonstrationRecord(p, a) for p, a in zip(PROMPTS, GOOD, strict=True)]
    losses = fit(sft, SFTCollator(pad_id)(encoded(records, tokenizer)), steps=4)
    assert losses[-1] < losses[0] - 0.05
    save_hf_model(sft.policy, tokenizer, sft_folder, sft.policy.state_dict(), stop_ids=stops)
    assert stop_ids(load_tokenizer(sft_folder), sft_folder) == stops

    reward = RewardModule(
        reward=RewardHparams(learning_rate=2e-3),
        model=partial(load_scalar_model, sft_folder, head="reward"),
        **common,
    )
    pairs = [PreferenceRecord(p, g, b) for p, g, b in zip(PROMPTS, GOOD, BAD, strict=True)]
    batch = PreferenceCollator(pad_id)(encoded(pairs, tokenizer))
    losses = fit(reward, batch, steps=4)
    assert losses[-1] < losses[0] - 0.05
    state = reward.model.state_dict()
    save_hf_model(reward.model, tokenizer, reward_folder, state, stop_ids=stops)
    stored = load_scalar_model(reward_folder)
    with torch.no_grad():
        scores = [
            sequence_scores(model, batch.chosen_input_ids, batch.chosen_attention_mask)
            for model in (reward.model, stored)
        ]
    torch.testing.assert_close(*scores, rtol=0, atol=1e-5)

    ppo = ppo_module(sft_folder, reward_folder)
    run_ppo(ppo, tokenizer)
    assert not torch.equal(flat_parameters(ppo.policy), flat_parameters(sft.policy))
    assert torch.equal(flat_parameters(ppo.reference), flat_parameters(sft.policy))
    assert not torch.equal(flat_parameters(ppo.value), flat_parameters(stored))


@pytest.mark.thorough
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_adapters_start_as_the_model_and_train_on_every_architecture(tmp_path, name):
    folder = hub_model(tmp_path, name)
    lora = LoraHparams(r=4, alpha=8)
    start = torch.cat([v.flatten() for v in load_policy(folder).state_dict().values()])
    module = ppo_module(folder, None, value_head="zero", lora=lora)
    module.scorer = TokenScorer(lambda ids, finished: float((ids % 5).sum()) / 10 - 1)
    run_ppo(module, load_tokenizer(folder))
    trained = module.policy.state_dict()
    assert any(v.abs().sum() > 0 for k, v in trained.items() if "lora_B" in k)
    assert sum(v.numel() for v in trained.values()) < start.numel()


def ppo_module(policy: Path, value: Path | None, **options: Any) -> Any:
    tokenizer = load_tokenizer(policy)
    return RecordedPPO(
        ppo=ppo_hparams(num_minibatches=2, num_ppo_epochs=1, micro_batch_size=2),
        sampling=SamplingHparams(max_new_tokens=8),
        models=partial(ppo_models, policy, value, **options),
        scorer=RewardModelScorer(partial(load_scalar_model, value)),
        generator=CachedGenerator(stop_ids(tokenizer, policy), int(tokenizer.pad_token_id)),
        tokenizer=tokenizer,
        optimizer=adamw,
        schedule=Schedule("constant"),
        seed=3,
    )


def run_ppo(module: Any, tokenizer: Any) -> None:
    """Run one iteration; check that it starts where it must."""
    rows = encoded([PromptRecord(p) for p in PROMPTS], tokenizer)
    batch = PromptCollator(int(tokenizer.pad_token_id))([(row, i) for i, row in enumerate(rows)])
    trainer().fit(module, DataLoader([batch], batch_size=None))
    (rollout,) = module.rollouts
    assert torch.equal(rollout.logprobs, rollout.ref_logprobs), "the policy starts as the reference"
    assert rollout.scores.std() > 0
    first = module.steps[0]
    assert first["ppo/approx_kl"] == 0
    assert first["ppo/clipfrac"] == 0
    assert len(module.steps) == 2
    assert all(torch.isfinite(torch.tensor(list(step.values()))).all() for step in module.steps)
