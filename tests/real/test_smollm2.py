"""On a real pretrained model PPO starts where it must: ratio 1, KL 0, nothing clipped.

SmolLM2-135M-Instruct pads with its EOS token, ties its head and has 30 layers. The folder is
taken from RLHF_SMOLLM2, or from the cache in the home folder.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from rlhf_lightning.batches import PromptBatch
from rlhf_lightning.data.collate import PromptCollator
from rlhf_lightning.data.encode import encode_prompt
from rlhf_lightning.data.records import PromptRecord
from rlhf_lightning.hparams import PPOHparams, SamplingHparams
from rlhf_lightning.models.ppo_models import ppo_models
from rlhf_lightning.modules import on_policy
from rlhf_lightning.modules.metrics import rollout_metrics
from rlhf_lightning.modules.optimization import Schedule
from rlhf_lightning.modules.ppo import PPOModule
from rlhf_lightning.rollout.generators.base import CachedGenerator
from rlhf_lightning.rollout.scorers.base import FunctionScorer
from rlhf_lightning.text.tokenizers import load_tokenizer, stop_ids

CACHE = "~/.cache/rlhf_lightning/smollm2-135m-instruct"
FOLDER = Path(os.environ.get("RLHF_SMOLLM2", CACHE)).expanduser()

pytestmark = [
    pytest.mark.skipif(
        not (FOLDER / "model.safetensors").is_file(),
        reason=f"SmolLM2-135M-Instruct is not in {FOLDER}: set RLHF_SMOLLM2 to its folder",
    ),
    pytest.mark.timeout(300),
]

# Of different lengths, so that prompts are padded and rows fall into two buckets.
OPENINGS = (
    "Review: the story of two",
    "Review: with a cast this",
    "Review: an hour in , the director seems to have lost interest",
    "Review: a slow",
    "Review: it is hard not to",
    "Review: what could have been a small and honest film becomes",
)


def count_letters(prompts: list[str], completions: list[str]) -> list[float]:
    return [len(completion) / 10 - 2 for completion in completions]


class Prompts(Dataset[PromptBatch]):
    def __init__(self, batch: PromptBatch) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> PromptBatch:
        return self.batch


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(FOLDER)


@pytest.fixture(scope="module")
def prompts(tokenizer: Any) -> PromptBatch:
    rows = [
        (encode_prompt(PromptRecord(opening), tokenizer, max_length=32), index)
        for index, opening in enumerate(OPENINGS)
    ]
    return PromptCollator(tokenizer.pad_token_id)(rows)


def make_module(tokenizer: Any, precision: str) -> PPOModule:
    return PPOModule(
        ppo=PPOHparams(num_ppo_epochs=1, num_minibatches=2, micro_batch_size=2),
        sampling=SamplingHparams(max_new_tokens=6),
        models=lambda: ppo_models(FOLDER, None, value_head="zero", precision=precision),
        scorer=FunctionScorer(count_letters),
        generator=CachedGenerator(stop_ids(tokenizer, FOLDER), tokenizer.pad_token_id),
        tokenizer=tokenizer,
        optimizer=lambda groups: torch.optim.SGD(groups),
        schedule=Schedule("constant"),
        seed=1,
    )


def fit_one_iteration(module: PPOModule, prompts: PromptBatch, precision: str, root: Path) -> None:
    trainer = L.Trainer(
        max_epochs=1,
        accelerator="cpu",
        precision=precision,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=root,
    )
    trainer.fit(module, DataLoader(Prompts(prompts), batch_size=None))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "precision", [pytest.param("32-true", marks=pytest.mark.slow), "bf16-mixed"]
)
def test_ppo_on_smollm2_starts_with_ratio_one_and_kl_zero(
    tokenizer, prompts, precision, monkeypatch, tmp_path
):
    module = make_module(tokenizer, precision)
    ratios, measured, rollouts = [], [], []
    counted, update = on_policy.ratio_counts, PPOModule.update
    collect = PPOModule.collect_rollout

    def watched_ratios(log_ratio, mask):
        ratios.append(log_ratio.detach().exp()[mask])
        return counted(log_ratio, mask)

    def first_update(self, minibatch, steps, **place):
        update(self, minibatch, steps, **place)
        measured.append(steps.means())
        return False  # the second minibatch may move

    def watched_rollout(self, *arguments):
        rollouts.append(collect(self, *arguments))
        return rollouts[-1]

    monkeypatch.setattr(on_policy, "ratio_counts", watched_ratios)
    monkeypatch.setattr(PPOModule, "update", first_update)
    monkeypatch.setattr(PPOModule, "collect_rollout", watched_rollout)
    fit_one_iteration(module, prompts, precision, tmp_path)

    ((rollout, _),), (first,) = rollouts, measured
    mask = rollout.response_mask
    assert mask.sum() > 12

    ratio = torch.cat(ratios)
    assert len(ratios) >= 2  # more than one micro-batch, of other rows than in the rollout
    assert torch.equal(ratio, torch.ones_like(ratio))
    assert first["ppo/approx_kl"] == 0.0
    assert first["ppo/clipfrac"] == 0.0
    assert first["ppo/policy_grad_norm"] > 0.0

    assert torch.equal(rollout.logprobs, rollout.ref_logprobs)
    assert bool((rollout.logprobs[mask] < 0).all())
    measures = rollout_metrics(rollout, "ppo")
    assert measures["rollout/kl_per_token"] == 0.0
    assert measures["rollout/kl_per_response"] == 0.0


def test_smollm2_pads_with_the_token_that_ends_a_response(tokenizer):
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    assert tokenizer.eos_token_id in stop_ids(tokenizer, FOLDER)
