"""A tiny real PPOModule: its parts, a Trainer around it, and rollouts and gradients without one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from rlhf_lightning.batches import PromptBatch, RolloutBatch
from rlhf_lightning.hparams import PPOHparams, SamplingHparams
from rlhf_lightning.models.factory import frozen
from rlhf_lightning.models.forward import micro_batches
from rlhf_lightning.models.heads import PolicyModel, ScalarHeadModel
from rlhf_lightning.models.ppo_models import PPOModels
from rlhf_lightning.modules.metrics import RunningMeans
from rlhf_lightning.modules.ppo import PPOModule
from rlhf_lightning.modules.schedules import Schedule
from rlhf_lightning.rollout.generators.base import CachedGenerator
from rlhf_lightning.rollout.scorers.base import Answers, Scores
from tests.tiny import (
    EOS,
    PAD,
    flat_gradients,
    prompt_batch,
    prompt_rows,
    tiny_policy,
    tiny_scalar_model,
    tiny_tokenizer,
)

# Many stop tokens, so that short random responses end in every possible way.
STOPS = (EOS, *range(2, 8))
ROWS = 16
LENGTHS = (3, 8, 1, 5, 8, 2, 7, 4, 6, 3, 1, 8, 2, 2, 5, 9)


class TokenScorer:
    """Scores response ids; `function(ids, finished)` gets one response without padding."""

    def __init__(self, function: Callable[[Tensor, bool], float]) -> None:
        self.function = function

    def build(self, base: Any = None) -> list[torch.nn.Module]:
        return []

    def __call__(self, answers: Answers) -> Scores:
        mask = answers.response_mask
        bodies = answers.sequences[:, -mask.shape[1] :]
        rows = zip(bodies, mask, answers.finished.tolist(), strict=True)
        total = torch.tensor([float(self.function(ids[m], done)) for ids, m, done in rows])
        return Scores(total, {"tokens": total})


def some_score(ids: Tensor, finished: bool) -> float:
    return float((ids % 5).float().mean() - 2 + 0.5 * finished)


def adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, eps=1e-5, weight_decay=0.0)


class RecordedPPO(PPOModule):
    """PPOModule that also keeps its rollouts, the measures and the gradients of its steps."""

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        self.rollouts: list[RolloutBatch] = []
        self.steps: list[dict[str, float]] = []
        self.num_optimizer_steps = 0

    def collect_rollout(self, prompts: PromptBatch, iteration: int) -> Any:
        rollout, seconds = super().collect_rollout(prompts, iteration)
        self.rollouts.append(rollout)
        return rollout, seconds

    def update(self, minibatch: RolloutBatch, steps: RunningMeans, *, iteration: int) -> bool:
        own = RunningMeans()
        keep_going = super().update(minibatch, own, iteration=iteration)
        self.steps.append(own.means())
        if own.num_steps:
            steps.add(own.means())
        return keep_going

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.num_optimizer_steps += 1


def ppo_hparams(**changes: Any) -> PPOHparams:
    defaults = {"learning_rate": 1e-3, "value_learning_rate": 3e-3, "num_ppo_epochs": 2}
    return PPOHparams(**(defaults | changes))


def tiny_models(
    model_type: str = "gpt2",
    policy: Callable[[], PolicyModel] | None = None,
    value: Callable[[], ScalarHeadModel] | None = None,
) -> PPOModels:
    policy = policy or (lambda: tiny_policy(model_type))
    value = value or (lambda: tiny_scalar_model(model_type))
    return PPOModels(policy(), value(), frozen(policy()))


def tiny_module(
    model_type: str = "gpt2",
    *,
    ppo: PPOHparams | None = None,
    sampling: SamplingHparams | None = None,
    cls: type[PPOModule] = RecordedPPO,
    pad: int = PAD,
    **changes: Any,
) -> Any:
    parts: dict[str, Any] = {
        "ppo": ppo or ppo_hparams(),
        "sampling": sampling or SamplingHparams(max_new_tokens=9, temperature=0.9),
        "models": lambda: tiny_models(model_type),
        "scorer": TokenScorer(some_score),
        "generator": CachedGenerator(STOPS, pad),
        "tokenizer": tiny_tokenizer(pad_is_eos=pad == EOS),
        "optimizer": adamw,
        "schedule": Schedule("linear"),
        "seed": 11,
    }
    return cls(**(parts | changes))


def built(module: Any) -> Any:
    """Build the models, for rollouts and losses without a Trainer."""
    module.configure_model()
    return module


def prompts(iteration: int = 0, *, rows: int = ROWS, pad: int = PAD, **options: Any) -> PromptBatch:
    texts = prompt_rows(LENGTHS[:rows], seed=iteration)
    return prompt_batch(texts, first_row=iteration * rows, pad=pad, **options)


def trainer(**options: Any) -> L.Trainer:
    defaults = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return L.Trainer(**(defaults | options))


def fit(module: Any, batches: Sequence[PromptBatch] | int, **options: Any) -> L.Trainer:
    if isinstance(batches, int):
        batches = [prompts(iteration) for iteration in range(batches)]
    the_trainer = trainer(**options)
    the_trainer.fit(module, DataLoader(list(batches), batch_size=None))
    return the_trainer


def rollout_of(module: Any, batch: PromptBatch | None = None, iteration: int = 0) -> RolloutBatch:
    rollout, _ = module.collect_rollout(prompts() if batch is None else batch, iteration)
    return rollout


def loss_and_gradients(
    module: Any, rollout: RolloutBatch, *, micro_batch_size: int | None = None
) -> tuple[float, Tensor, Tensor]:
    """Return the loss of a minibatch and its gradients wrt policy and value model."""
    module.zero_grad()
    num_tokens = rollout.response_mask.sum()
    total = 0.0
    for rows in micro_batches(rollout.attention_mask, micro_batch_size):
        for term in module.loss_terms(0):
            loss, _ = term(rollout[rows], num_tokens)
            loss.backward()
            total += float(loss.detach())
    return total, flat_gradients(module.policy), flat_gradients(module.value)


def after_some_training(rollout: RolloutBatch) -> RolloutBatch:
    """Move the old log-probabilities and values, as if the models had been updated since."""
    generator = torch.Generator().manual_seed(4)
    noise = torch.randn(rollout.logprobs.shape, generator=generator)
    mask = rollout.response_mask
    return replace(
        rollout,
        logprobs=torch.where(mask, rollout.logprobs + 0.15 * noise, 0),
        values=torch.where(mask, rollout.values + 0.15 * noise.flip(0), 0),
    )
