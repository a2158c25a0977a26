"""Checks of a module's Trainer and data, which prevent silently wrong training."""

from __future__ import annotations

import inspect
import logging
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, cast

import lightning as L
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    StochasticWeightAveraging,
)
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from transformers import PreTrainedModel

from rlhf_lightning.batches import RolloutBatch
from rlhf_lightning.data.datamodules import PromptDataModule
from rlhf_lightning.data.record_datamodule import RecordDataModule
from rlhf_lightning.distributed.collectives import global_sum, whole
from rlhf_lightning.misfit import did_you_mean, shown
from rlhf_lightning.models.classifiers import max_positions
from rlhf_lightning.models.heads import PolicyModel, ScalarHeadModel
from rlhf_lightning.rollout.scorers.base import Responses, Scores
from rlhf_lightning.text.decode import token_names
from rlhf_lightning.text.tokenizers import tokenizer_difference

logger = logging.getLogger(__name__)
TRAINED_IN = ("32-true", "bf16-mixed")
DEAD_ROW = 1e-3  # of the median norm


def check_trainer(trainer: L.Trainer) -> None:
    """Check the flags of a Trainer, before a model is read.

    `trainer_arguments` sets all of them.

    Args:
        trainer: Trainer that was given the module.

    Raises:
        ValueError: with the flag, its value, why that is wrong and the fix.
    """
    if getattr(trainer.lightning_module, "_compiler_ctx", None) is not None:
        told = "torch.compile(module) cannot compile a training step: give the Trainer the module"
        fix = "module.configure_model(), then module.policy.model.base_model.compile()"
        raise ValueError(f"{told} itself, with its decoder compiled by {fix}")
    trains = trainer.state.fn == TrainerFn.FITTING
    problems = (*_rank_problems(trainer), *(_training_problems(trainer) if trains else ()))
    for is_wrong, problem in problems:
        if is_wrong:
            raise ValueError(
                f"Trainer({problem}. trainer_arguments(folder, ...) sets what a stage needs"
            )


def _rank_problems(trainer: Any) -> Iterator[tuple[bool, str]]:
    """Yield whether each flag of several ranks is wrong, and it with the reason and the fix."""
    name = type(trainer.strategy).__name__
    yield (
        name in ("FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy"),
        f"strategy={name}) does not shard our models: use strategy=FSDP2Strategy()",
    )
    yield (
        trainer.world_size > 1 and trainer._accelerator_connector.use_distributed_sampler,
        "use_distributed_sampler=True), its default, shards rows that our DataModules shard: use "
        "False",
    )


def _training_problems(trainer: Any) -> Iterator[tuple[bool, str]]:
    """Yield the same of flags that training alone reads."""
    module = trainer.lightning_module
    for found in (type(callback).__name__ for callback in trainer.callbacks):
        yield (
            found in ("LearningRateFinder", "BatchSizeFinder"),
            f"callbacks={found}), of Lightning's Tuner: compare runs of several learning_rate; a "
            "micro_batch_size that fits memory is chosen where it is left out",
        )
    yield (
        bool(trainer.overfit_batches),
        f"overfit_batches={trainer.overfit_batches}): give a DataModule with so few rows, and "
        "max_iterations=...",
    )
    steps = module.num_steps
    epochs = "its default" if trainer.max_epochs in (None, 1000) else "given"
    yield (
        trainer.max_epochs != 1,
        f"max_epochs={trainer.max_epochs}), {epochs}: a stage is one epoch: use max_epochs=1",
    )
    yield (
        trainer.max_steps != -1 and steps > 1 and not trainer.fast_dev_run,
        f"max_steps={trainer.max_steps}) counts optimizer steps, up to {steps} an iteration: use "
        "max_steps=-1 and max_iterations=..., that is limit_train_batches",
    )
    yield (
        trainer.precision not in TRAINED_IN,
        f"precision={trainer.precision!r}): weights are trained in fp32, as 16 bits lose small "
        f"updates: use one of {', '.join(TRAINED_IN)}",
    )
    yield (
        any(isinstance(c, StochasticWeightAveraging) for c in trainer.callbacks),
        "callbacks=StochasticWeightAveraging) averages epochs, and a stage is one epoch: use "
        "EMAWeightAveraging(decay=...)",
    )
    averages = [c for c in trainer.callbacks if isinstance(c, EMAWeightAveraging)]
    yield (
        steps > 1 and any(c.update_every_n_steps != 1 for c in averages),
        "callbacks=EMAWeightAveraging(update_every_n_steps=...)) looks once an iteration, here of "
        f"{steps} optimizer steps, and could average none: use update_every_n_steps=1",
    )
    stops = any(isinstance(c, EarlyStopping) for c in trainer.callbacks)
    yield (
        stops and not is_overridden("validation_step", module, L.LightningModule),
        f"callbacks=EarlyStopping): {type(module).__name__} has no validation: leave it out",
    )


def check_hooks(module: type) -> None:
    """Check that hooks of a subclass call ours, which check, time and keep state.

    Raises:
        TypeError: if one does not.
    """
    ours = [base for base in module.__mro__ if base.__module__.startswith("rlhf_lightning.")]
    beginnings = ("on_", "configure_callbacks")
    for name in sorted({n for base in ours for n in vars(base) if n.startswith(beginnings)}):
        hook = inspect.unwrap(getattr(module, name))
        is_own = not hook.__module__.startswith("rlhf_lightning.")
        if is_own and name not in hook.__code__.co_names:
            told = f"{hook.__qualname__} leaves out what {name} does in {ours[0].__name__}"
            raise TypeError(f"{told}: call super().{name}(...) in it")


def check_trained(module: Any) -> None:
    """Check that the first iteration has left a step or a gradient.

    Raises:
        TypeError: if not, as a training step of a subclass returns its loss alone.
    """
    if module.skipped.num_iterations or module.trainer.global_step:
        return
    if all(parameter.grad is None for parameter in module.parameters()):
        name = f"{type(module).__name__}.training_step"
        fix = "return super().training_step(...), or call manual_backward and optimizers().step()"
        raise TypeError(f"{name} trained nothing, as optimization is manual: {fix}")


def check_module(module: L.LightningModule) -> None:
    """Check a module's weights, which are trained in fp32, its optimizer and hyper-parameters.

    Raises:
        ValueError: if every weight is frozen, or those to train have 16 bits.
        TypeError: if it has several optimizers, or no schedule; for a hyper-parameter that no
            checkpoint can hold, as `save_hyperparameters()` of a subclass keeps them.
    """
    dtypes = {weight.dtype for weight in module.parameters() if weight.requires_grad}
    if not dtypes:
        raise ValueError("every weight of the module is frozen: call module.unfreeze()")
    if halves := dtypes & {torch.float16, torch.bfloat16}:
        told = f"the weights to train are {halves.pop()}, and 16 bits lose small updates"
        raise ValueError(f"{told}: call module.float()")
    trainer: Any = module.trainer
    if not len(trainer.optimizers) == len(trainer.lr_scheduler_configs) == 1:
        told = "configure_optimizers must return one optimizer with one lr_scheduler"
        fix = "leave it out, and give from_pretrained(optimizer=..., schedule=...)"
        raise TypeError(f"{type(module).__name__}.{told}: {fix}")
    if lost := [name for name, value in module.hparams.items() if not _is_plain(value)]:
        told = f"save_hyperparameters kept {', '.join(lost)}, which no checkpoint can hold"
        raise TypeError(f"{told}: use save_hyperparameters(ignore={lost})")


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping | list | tuple):
        return all(map(_is_plain, value.values() if isinstance(value, Mapping) else value))
    return value is None or isinstance(value, str | int | float | torch.dtype | torch.Tensor)


def check_data(module: Any) -> None:
    """Check that a module can train on its Trainer's DataModule, if it is one of ours.

    Args:
        module: an `RLHFModule` whose models are built.

    Raises:
        TypeError: if the data are records of another kind.
        ValueError: if their tokenizer is not the module's, if the rows may be longer than the
            model's context, or if they hold a token that it has no embedding for.
    """
    data = getattr(module.trainer, "datamodule", None)
    if not isinstance(data, RecordDataModule):
        return
    name, given = type(module).__name__, type(data).__name__
    kinds = module.kinds_of_records(module.algorithm)
    if data.kind not in kinds:
        told = f"{name} trains on {' or '.join(kinds)}, and {given} gives {data.kind}"
        raise TypeError(f"{told}: give a {module.data.__name__} of kind={kinds[0]}")
    tokenizer, theirs = module.tokenizer, data.tokenizer
    if tokenizer is not None and (what := tokenizer_difference(tokenizer, theirs)) is not None:
        told = f"{given} has another tokenizer than {name} ({what})"
        raise ValueError(f"{told}: give {given}(..., module.tokenizer)")
    samples = module.sampling.max_new_tokens if isinstance(data, PromptDataModule) else None
    models = list(_models(module))
    _check_context(models, data, samples)
    if models:  # policy, value and reward model read the same ids
        check_token_rows(models[0], theirs, data.token_ids())


def _check_context(
    models: Sequence[PreTrainedModel], data: RecordDataModule, max_new_tokens: int | None
) -> None:
    name = "max_length" if max_new_tokens is None else "max_prompt_length"
    asked = {f"{type(data).__name__}.{name}": data.max_length}
    if max_new_tokens is not None:
        asked["SamplingHparams.max_new_tokens"] = max_new_tokens
    shortest = min(models, key=lambda model: max_positions(model) or math.inf, default=None)
    limit = shortest and max_positions(shortest)
    if shortest and limit and sum(asked.values()) > limit:
        told = f"{' + '.join(f'{key}={value}' for key, value in asked.items())} tokens are more"
        read = f"than the {limit} that {shortest.name_or_path or 'the model'} reads"
        raise ValueError(f"{told} {read}: lower {' or '.join(asked)}")


@torch.no_grad()
def check_token_rows(model: Any, tokenizer: Any, used: Collection[int]) -> None:
    """Check that a model has an embedding for every token of the data, and name untrained ones.

    Added tokens of a base model, such as those of a chat template, may have untrained rows:
    (nearly) 0, or the same as that of another one. The first gradients are then huge.

    Raises:
        ValueError: if there is no embedding for one of them.
    """
    weight = model.get_input_embeddings().weight
    if beyond := sorted(i for i in used if i >= len(weight)):
        told = f"the data hold {token_names(beyond, tokenizer)} (id {beyond[0]} and up), and "
        told += f"{type(model).__name__} has {len(weight)} embeddings"
        fix = f"call resize_token_embeddings({len(tokenizer)}), or take its own tokenizer"
        raise ValueError(f"{told}: {fix}")
    added = sorted(set(used) & set(tokenizer.added_tokens_decoder) - {tokenizer.pad_token_id})
    size, total = (whole(each.float()) for each in (weight.norm(dim=1), weight.sum(dim=1)))
    rows = list(zip(size.tolist(), total.tolist(), strict=True))
    times, least = Counter(rows), DEAD_ROW * float(size.median())
    if dead := [i for i in added if rows[i][0] <= least or times[rows[i]] > 1]:
        told = "the data has tokens with untrained embeddings, %s (0, or equal to others): "
        told += "start from a model that knows them, or set their rows to the mean of the others"
        logger.warning(told, token_names(dead, tokenizer))


def _models(module: L.LightningModule) -> Iterator[PreTrainedModel]:
    """Yield the models that read the rows, first what is trained; those of texts cut theirs."""
    trained = [getattr(module, name, None) for name in ("policy", "model", "value")]
    for model in (*trained, *getattr(module, "frozen_models", ())):
        if isinstance(model, PolicyModel | ScalarHeadModel):
            parts = model.root.modules()
            yield from (part for part in parts if isinstance(part, PreTrainedModel))


def check_whole_groups(module: type, group_size: int) -> None:
    """Check that a class with a loss of its own says whether micro-batches hold whole groups.

    Args:
        module: class of an `OnPolicyModule`.
        group_size: responses to each prompt.

    Raises:
        ValueError: if it does not, and a prompt has several responses.
    """
    if group_size == 1 or module.whole_groups_in_micro_batches is not None:  # type: ignore[attr-defined]
        return
    for name in ("policy_loss", "loss_terms"):
        if not getattr(module, name).__module__.startswith("rlhf_lightning."):
            told = f"{module.__name__}.{name} may compare a prompt's {group_size} responses"
            fix = "set whole_groups_in_micro_batches = True on the class, or False if it does not"
            raise ValueError(f"{told}, which micro-batches may part: {fix}")


def check_ready(module: Any, counts: Sequence[int]) -> None:
    """Check what a rollout needs of an `OnPolicyModule`.

    Args:
        module: the module.
        counts: prompts of each rank.

    Raises:
        RuntimeError: if its models are not built.
        ValueError: if ranks have another number of prompts, or a weighted domain has none.
    """
    if module.policy is None:
        raise RuntimeError(f"call {type(module).__name__}.configure_model() first")
    if len(set(counts)) > 1:
        told = f"the ranks were given {', '.join(map(str, counts))} prompts"
        raise ValueError(f"{told}: give each as many, as a PromptDataModule does")
    data = getattr(module._trainer, "datamodule", None)
    known = data.summary.domains if isinstance(data, RecordDataModule) else None
    for name in module.controls.domain_weights:
        if known is not None and name not in known:
            hint = did_you_mean(name, known) or f": use one of {sorted(known)}"
            raise ValueError(f"controls.domain_weights: no prompt is of domain {name!r}{hint}")


def check_result(maker: object, found: object, kind: type) -> None:
    """Check what a part of a module has returned, which may be the user's own.

    Raises:
        TypeError: if it is of another kind.
    """
    if not isinstance(found, kind):
        wanted = f"{kind.__name__}({', '.join(getattr(kind, '_fields', ()))}) of {kind.__module__}"
        raise TypeError(f"{_name_of(maker)} returned {shown(found)}: return {wanted}")


def score(scorer: Any, responses: Responses) -> Scores:
    """Return what a scorer gives: a score a row.

    Raises:
        TypeError: if it is something else than `Scores`.
        ValueError: if a part has another shape.
    """
    scores, count = scorer(responses), len(responses.prompts)
    check_result(scorer, scores, Scores)
    for name, part in {"total": scores.total, **scores.components}.items():
        if getattr(part, "shape", None) != (count,):
            told = f"{_name_of(scorer)} returned {name} of {shown(part)}"
            raise ValueError(f"{told}: return a tensor of one score a row, of shape [{count}]")
    return cast(Scores, scores)


def estimate(
    estimator: Any, rewards: Tensor, values: Tensor | None, mask: Tensor, groups: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Return what an estimator gives: advantages and returns.

    Raises:
        TypeError: if it is no pair, or lacks the targets of a value model, which has `values`.
    """
    found = estimator(rewards, values, mask, groups)
    pair = found if isinstance(found, tuple) and len(found) == 2 else (None, None)
    tensors = [isinstance(one, Tensor) for one in pair]
    if tensors[0] and (tensors[1] or (values is None and pair[1] is None)):
        return pair  # type: ignore[return-value]
    told = f"{_name_of(estimator)} returned {shown(found)}"
    fix = "return (advantages, returns), each [B, R]; returns may be None without a value model"
    raise TypeError(f"{told}: {fix}")


def _name_of(part: object) -> str:
    return str(getattr(part, "__name__", type(part).__name__))


def check_sampler(module: Any, rollout: RolloutBatch) -> None:
    """Check that the log-probabilities that the loss reads are there.

    Args:
        module: an `OnPolicyModule`, whose hyper-parameters say what the loss reads.
        rollout: rollout of this rank.

    Raises:
        RuntimeError: if some are not finite where the policy's are.
        ValueError: if there are none.
    """
    algorithm, generator = module.algorithm, module.generator
    if algorithm.ratio_base == "sampler":
        setting, other = "ratio_base=sampler", "ratio_base=old"
    elif algorithm.off_policy != "none":
        setting, other = f"off_policy={algorithm.off_policy}", "off_policy=none"
    else:
        return
    sampler, setting = rollout.sampler_logprobs, f"module.{module.stage}.{setting}"
    if sampler is None:
        told = f"{setting} needs log-probabilities, and {type(generator).__name__} gives none"
        raise ValueError(f"{told}: use rollout=cached, or {other}")
    wrong = rollout.response_mask & ~sampler.isfinite() & rollout.logprobs.isfinite()
    if count := int(global_sum(wrong.sum())):
        name = getattr(generator, "name", type(generator).__name__)
        told = f"{count} log-probabilities of {name}, which {setting} reads, are not finite"
        raise RuntimeError(f"{told}: mend the sampler, or use {other}")


def exceeds_target_kl(module: Any, measured: Mapping[str, Any]) -> bool:
    """Return whether approx_kl of a minibatch exceeds `target_approx_kl`.

    Args:
        module: an `OnPolicyModule`.
        measured: metrics of the minibatch, over all ranks.

    Raises:
        ValueError: if there is a target, and the policy's loss does not measure it.
    """
    name, target = f"{module.stage}/approx_kl", module.algorithm.target_approx_kl
    if target is None:
        return False
    if name not in measured:
        told = f"{type(module.algorithm).__name__}.target_approx_kl={target:g} bounds {name}"
        found = f"{module.policy_loss.__qualname__} returns only {sorted(measured)}"
        raise ValueError(f"{told}, and {found}: add it, or set target_approx_kl=None")
    return target < float(measured[name]) < math.inf
