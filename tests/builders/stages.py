"""Tiny modules of every stage, their batches, and steps of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType, SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from rlhf_lightning.batches import Generation, PreferenceBatch, PromptBatch, RolloutBatch, SFTBatch
from rlhf_lightning.distributed.collectives import global_sum
from rlhf_lightning.hparams import (
    DistillationHparams,
    DPOHparams,
    GRPOHparams,
    PPOHparams,
    RewardHparams,
    SamplingHparams,
    SFTHparams,
)
from rlhf_lightning.models.factory import frozen
from rlhf_lightning.models.forward import micro_batches
from rlhf_lightning.models.heads import PolicyModel, ScalarHeadModel
from rlhf_lightning.models.ppo_models import PolicyModels, PPOModels
from rlhf_lightning.modules import base, optimization
from rlhf_lightning.modules.distillation import DistillationModule
from rlhf_lightning.modules.dpo import DPOModule
from rlhf_lightning.modules.grpo import PolicyGradientModule
from rlhf_lightning.modules.metrics import RunningMeans
from rlhf_lightning.modules.optimization import Schedule, StepCounts
from rlhf_lightning.modules.ppo import PPOModule
from rlhf_lightning.modules.reward import RewardModule
from rlhf_lightning.modules.sft import SFTModule
from rlhf_lightning.rollout.generators.base import CachedGenerator
from rlhf_lightning.rollout.scorers.base import NoReward, Responses, Scores
from tests.builders.models import (
    EOS,
    PAD,
    flat_gradients,
    flat_parameters,
    prompt_batch,
    prompt_rows,
    tiny_policy,
    tiny_scalar_model,
    tiny_tokenizer,
)
from tests.builders.ranks import SimulatedRanks

# Many stop tokens, so that short random responses end in every possible way.
STOPS = (EOS, *range(2, 8))
ROWS = 16
LENGTHS = (3, 8, 1, 5, 8, 2, 7, 4, 6, 3, 1, 8, 2, 2, 5, 9)


class TokenScorer:
    """Scores response ids; `function(ids, finished)` gets one response without padding."""

    normalized = True  # like a reward model

    def __init__(self, function: Callable[[Tensor, bool], float]) -> None:
        self.function = function

    def build(self, base: Any = None) -> list[torch.nn.Module]:
        return []

    def __call__(self, answers: Responses) -> Scores:
        mask = answers.response_mask.cpu()
        bodies = answers.sequences[:, -mask.shape[1] :].cpu()
        rows = zip(bodies, mask, answers.finished.tolist(), strict=True)
        values = [float(self.function(ids[m], done)) for ids, m, done in rows]
        total = torch.tensor(values, device=answers.sequences.device)
        return Scores(total, {"tokens": total})


def some_score(ids: Tensor, finished: bool) -> float:
    return float((ids % 5).float().mean() - 2 + 0.5 * finished)


def adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, eps=1e-5, weight_decay=0.0)


class Recorded:
    """Mixin: keep the rollouts, the minibatches and the measures of the steps."""

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        self.rollouts: list[RolloutBatch] = []
        self.minibatches: list[RolloutBatch] = []
        self.steps: list[dict[str, float]] = []
        self.num_optimizer_steps = 0

    def collect_rollout(self: Any, prompts: PromptBatch, iteration: int) -> Any:
        rollout, seconds = super().collect_rollout(prompts, iteration)  # type: ignore[misc]
        self.rollouts.append(rollout)
        return rollout, seconds

    def update(self: Any, minibatch: RolloutBatch, steps: RunningMeans, **where: int) -> bool:
        own = RunningMeans()
        self.minibatches.append(minibatch)
        keep_going: bool = super().update(minibatch, own, **where)  # type: ignore[misc]
        self.steps.append(own.means())
        steps.add(own.means() | own.totals, took_step=bool(own.num_steps))
        return keep_going

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.num_optimizer_steps += 1


class RecordedPPO(Recorded, PPOModule):
    """PPOModule that can be looked into."""


class RecordedGRPO(Recorded, PolicyGradientModule):
    """PolicyGradientModule that can be looked into."""


class OtherSampler(CachedGenerator):
    """Says of each token another log-probability than it had, as an engine of its own would.

    The difference, up to `gap` nats to either side, is a function of row and position.
    """

    def __init__(self, *arguments: Any, gap: float = 0.5) -> None:
        super().__init__(*arguments)
        self.gap = gap

    def __call__(self, model: Any, prompts: PromptBatch, **options: Any) -> Generation:
        generation = super().__call__(model, prompts, **options)
        assert generation.logprobs is not None
        noise = replace(options["noise"], purpose="best_of")
        positions = torch.arange(generation.logprobs.shape[1])
        shift = self.gap * (2 * noise.uniform(prompts.row_ids.unsqueeze(-1), positions) - 1)
        # In one direction along a row, so that some ratios of responses leave any band.
        shift = shift + self.gap * (2 * noise.uniform(prompts.row_ids, 99) - 1).unsqueeze(-1)
        shift = torch.where(generation.response_mask, shift.float(), 0)
        return replace(generation, logprobs=generation.logprobs + shift)


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
    return PPOModels(policy=policy(), value=value(), reference=frozen(policy()))


def tiny_module(
    model_type: str = "gpt2",
    *,
    ppo: PPOHparams | None = None,
    cls: type[PPOModule] = RecordedPPO,
    pad: int = PAD,
    **changes: Any,
) -> Any:
    parts: dict[str, Any] = {
        "ppo": ppo or ppo_hparams(),
        "models": lambda: tiny_models(model_type),
        **_common_parts(pad),
    }
    return cls(**(parts | changes))


def _common_parts(pad: int = PAD) -> dict[str, Any]:
    return {
        "sampling": SamplingHparams(max_new_tokens=9, temperature=0.9),
        "scorer": TokenScorer(some_score),
        "generator": CachedGenerator(STOPS, pad),
        "tokenizer": tiny_tokenizer(pad_is_eos=pad == EOS),
        "optimizer": adamw,
        "schedule": Schedule("linear"),
        "seed": 11,
    }


GROUP = 4  # responses to a prompt


def tiny_grpo(
    model_type: str = "gpt2",
    *,
    grpo: GRPOHparams | None = None,
    cls: type[PolicyGradientModule] = RecordedGRPO,
    **changes: Any,
) -> Any:
    parts: dict[str, Any] = {
        "grpo": grpo or grpo_hparams(),
        "models": lambda: PolicyModels(
            policy=tiny_policy(model_type), reference=frozen(tiny_policy(model_type))
        ),
        **_common_parts(),
    }
    return cls(**(parts | changes))


def tiny_distillation(
    model_type: str = "gpt2",
    *,
    distillation: DistillationHparams,
    cls: type[DistillationModule] = DistillationModule,
    teacher: Mapping[str, Any] = MappingProxyType({}),
    **changes: Any,
) -> Any:
    """A module whose teacher is another model, with changes of its config if `teacher` has any."""
    parts: dict[str, Any] = {
        "distillation": distillation,
        "models": lambda: PolicyModels(
            policy=tiny_policy(model_type),
            reference=frozen(tiny_policy(model_type)),
            teacher=frozen(tiny_policy(model_type, seed=7, **teacher)),
        ),
        **_common_parts(),
        "scorer": NoReward(),
    }
    return cls(**(parts | changes))


def grpo_hparams(**changes: Any) -> GRPOHparams:
    return GRPOHparams(**({"learning_rate": 1e-3} | changes))


def grouped(batch: PromptBatch, size: int = GROUP) -> PromptBatch:
    """Return the batch with `size` rows a prompt, numbered as the data module numbers them."""
    rows = torch.arange(len(batch)).repeat_interleave(size)
    numbers = batch.row_ids[rows]
    own = numbers * size + torch.arange(len(rows)) % size
    return replace(batch[rows], row_ids=own, group_ids=numbers)


def group_prompts(iteration: int = 0, *, rows: int = ROWS // GROUP) -> PromptBatch:
    return grouped(prompts(iteration, rows=rows))


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


def counts_of(rollout: RolloutBatch) -> StepCounts:
    """Return the counts of an optimizer step on the whole rollout."""
    return StepCounts(rollout.response_mask.sum(), len(rollout), rollout.reward_mask.sum())


def policy_loss_and_gradient(
    module: Any, rollout: RolloutBatch, *, micro_batch_size: int | None = None
) -> tuple[float, Tensor, dict[str, float]]:
    """Return the policy's loss on a minibatch, its gradient, and the sums of its measures."""
    module.zero_grad()
    total, measures = 0.0, Counter[str]()
    for rows in micro_batches(rollout.attention_mask, micro_batch_size):
        loss, measured = module.policy_loss(rollout[rows], counts_of(rollout))
        loss.backward()
        total += float(loss.detach())
        measures.update({k: float(v.detach()) for k, v in measured.items() if v.dim() == 0})
    return total, flat_gradients(module.policy), dict(measures)


def loss_and_gradients(
    module: Any, rollout: RolloutBatch, *, micro_batch_size: int | None = None
) -> tuple[float, Tensor, Tensor]:
    """Return the loss of a minibatch and its gradients wrt policy and value model."""
    module.zero_grad()
    total = 0.0
    for rows in micro_batches(rollout.attention_mask, micro_batch_size):
        for term in module.loss_terms(0, 0):
            loss, _ = term(rollout[rows], counts_of(rollout))
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
        values=None
        if rollout.values is None
        else torch.where(mask, rollout.values + 0.15 * noise.flip(0), 0),
    )


SUPERVISED: dict[str, Any] = {"optimizer": adamw, "schedule": Schedule("constant")}


def tiny_sft(model_type: str = "gpt2", **hparams: Any) -> Any:
    sft = SFTHparams(**({"learning_rate": 1e-3} | hparams))
    return SFTModule(sft=sft, policy=lambda: tiny_policy(model_type), **SUPERVISED)


def tiny_reward(model_type: str = "gpt2", *, init_std: float = 0.3, **hparams: Any) -> Any:
    reward = RewardHparams(**({"learning_rate": 1e-3} | hparams))
    model = partial(tiny_scalar_model, model_type, init_std=init_std)
    return RewardModule(reward=reward, model=model, **SUPERVISED)


def tiny_dpo(model_type: str = "gpt2", **hparams: Any) -> Any:
    dpo = DPOHparams(**({"learning_rate": 1e-3} | hparams))
    return DPOModule(dpo=dpo, policy=lambda: tiny_policy(model_type), **SUPERVISED)


def right_padded(rows: Sequence[Sequence[int]], width: int, fill: int) -> tuple[Tensor, Tensor]:
    ids = torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows])
    return ids, torch.arange(width) < torch.tensor([len(row) for row in rows])[:, None]


PROMPT_LENGTHS = (3, 7, 1, 9, 2, 5, 12, 4)
ANSWER_LENGTHS = (4, 2, 1, 12, 6, 1, 9, 3)
REJECTED_LENGTHS = (3, 9, 2, 6, 12, 4, 2, 4)


def sft_batch(*, width: int = 24, fill: int = PAD, seed: int = 0) -> SFTBatch:
    prompts = prompt_rows(PROMPT_LENGTHS, seed=seed)
    answers = [[*row[:-1], EOS] for row in prompt_rows(ANSWER_LENGTHS, seed=seed + 50)]
    rows = [p + a for p, a in zip(prompts, answers, strict=True)]
    ids, mask = right_padded(rows, width, fill)
    learnt = mask & (torch.arange(width) >= torch.tensor(PROMPT_LENGTHS)[:, None])
    return SFTBatch(ids, mask, learnt, ("",) * len(rows))


def preference_batch(
    *, width: int = 26, fill: int = PAD, seed: int = 0, margin: float = 0.0
) -> PreferenceBatch:
    prompts = prompt_rows(PROMPT_LENGTHS, seed=seed)
    sides = []
    for offset, lengths in ((50, ANSWER_LENGTHS), (70, REJECTED_LENGTHS)):
        answers = [[*row[:-1], EOS] for row in prompt_rows(lengths, seed=seed + offset)]
        rows = [p + a for p, a in zip(prompts, answers, strict=True)]
        sides.append((*right_padded(rows, width, fill), torch.tensor(lengths)))
    (chosen, chosen_mask, longer), (rejected, rejected_mask, shorter) = sides
    return PreferenceBatch(
        chosen_input_ids=chosen,
        chosen_attention_mask=chosen_mask,
        rejected_input_ids=rejected,
        rejected_attention_mask=rejected_mask,
        chosen_length=longer,
        rejected_length=shorter,
        margin=torch.full((8,), margin),
        domains=("",) * 8,
        row_ids=torch.arange(8),
    )


def without_trainer(module: Any) -> Any:
    """Give a module what its `training_step` needs of a Trainer."""
    module.configure_model()
    module._trainer = SimpleNamespace(
        strategy=SimpleNamespace(backward=lambda loss, *_: loss.backward())
    )
    groups = [{"params": list(module.parameters()), "lr": 1e-3}]
    optimizer = adamw(groups)
    module.logged = []
    module.optimizers = lambda: optimizer
    module.lr_schedulers = lambda: SimpleNamespace(step=lambda: None)
    module.log_dict = lambda values, **_: module.logged.append(dict(values))
    return module


def untaken_step(module: Any, batch: Any) -> tuple[dict[str, float], Tensor]:
    """Return the measures and the gradient of a training step, without taking it."""
    gradients: list[Tensor] = []

    def capture(*_: Any) -> Tensor:
        gradients.append(flat_gradients(module))
        module.zero_grad()  # which leaves the step nothing
        return torch.tensor(0.0)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(base, "clip_grad_norm", capture)
        module.training_step(batch, 0)
    return {name: float(value) for name, value in module.logged[-1].items()}, gradients[0]


def average_over_ranks(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Average gradients over simulated ranks before each step, as DDP and FSDP2 do."""

    def averaged(parameters: Iterable[nn.Parameter], _strategy: Any) -> None:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad = global_sum(parameter.grad) / size

    monkeypatch.setattr(optimization, "average_gradients", averaged)


def train_ranks(
    monkeypatch: pytest.MonkeyPatch, modules: Sequence[Any], batches: Sequence[Any]
) -> None:
    """Take one step a batch on `len(modules)` ranks, each with its contiguous share."""
    size = len(modules)
    ranks = SimulatedRanks(monkeypatch, size)
    average_over_ranks(monkeypatch, size)

    def one(rank: int) -> None:
        for number, batch in enumerate(batches):
            share = len(batch) // size
            modules[rank].training_step(batch[rank * share : (rank + 1) * share], number)

    ranks.run(one)


def assert_two_ranks_step_as_one(
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[], Any],
    batches: Sequence[Any],
    measures: Sequence[str],
) -> None:
    """Check weights and measures of two ranks with half of each batch against those of one."""
    one, *two = (make() for _ in range(3))
    start = flat_parameters(one)
    train_ranks(monkeypatch, [one], batches)
    train_ranks(monkeypatch, two, batches)
    moved = flat_parameters(one) - start
    assert moved.abs().max() > 1e-3
    for rank in two:
        torch.testing.assert_close(flat_parameters(rank) - start, moved, rtol=0, atol=1e-5)
        for ours, theirs in zip(rank.logged, one.logged, strict=True):
            for name in measures:
                near = {"rel": 1e-4} if "grad_norm" in name else {"rel": 1e-5, "abs": 1e-5}
                assert float(ours[name]) == pytest.approx(float(theirs[name]), **near)
