"""Construction of a run's objects from its settings: data, module, callbacks, logger, Trainer."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import lightning as L
import torch
from hydra.core.hydra_config import HydraConfig
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from rlhf_lightning.app.config.commands import CollectSettings, EvaluateSettings
from rlhf_lightning.app.config.compose import ConfigError, texts
from rlhf_lightning.app.config.groups import ModelSettings, Target
from rlhf_lightning.app.config.settings import TrainSettings
from rlhf_lightning.app.config.targets import Node, made, nodes
from rlhf_lightning.app.evaluation import (
    TrainingComponents,
    check_context_length,
    comparison_arguments,
    model_config,
    prompt_length,
)
from rlhf_lightning.app.run_claim import check_folder, record_end
from rlhf_lightning.app.sweep import in_sweep
from rlhf_lightning.arguments import fitting
from rlhf_lightning.callbacks.checkpointing import IterationCheckpoint, mode_of
from rlhf_lightning.callbacks.doctor.callback import Doctor
from rlhf_lightning.callbacks.doctor.rollouts import Refusals
from rlhf_lightning.callbacks.exact_resume import SameConfiguration
from rlhf_lightning.callbacks.periodic_evaluation import PeriodicEvaluation
from rlhf_lightning.callbacks.tensorboard_logger import tensorboard_logger
from rlhf_lightning.callbacks.trainer_arguments import trainer_arguments
from rlhf_lightning.callbacks.wandb_logger import wandb_logger
from rlhf_lightning.distributed.process import cpu_threads as set_cpu_threads
from rlhf_lightning.distributed.strategy import make_strategy
from rlhf_lightning.doctor.thresholds import DoctorThresholds
from rlhf_lightning.evaluation.held_out import encode_safety_prompts
from rlhf_lightning.models.attention import attention_backends as set_attention_backends
from rlhf_lightning.models.cpu_kernels import cpu_kernels as set_cpu_kernels
from rlhf_lightning.models.gpu_kernels import gpu_kernels
from rlhf_lightning.models.learning_rates import Kind, default_learning_rate
from rlhf_lightning.models.micro_batching import micro_batching
from rlhf_lightning.models.precision import set_matmul_precision
from rlhf_lightning.models.quiet import quieten
from rlhf_lightning.modules.optimization import check_optimizer
from rlhf_lightning.rollout.generators.vllm import QUANTIZED, VllmGenerator
from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.lock import claim_run
from rlhf_lightning.runs.public_config import public_config
from rlhf_lightning.runs.summary import (
    Summary,
    git_commit,
    installed_versions,
    new_summary,
    write_summary,
)
from rlhf_lightning.text.tokenizers import (
    load_tokenizer,
    vocabulary_of,
    with_template,
    with_template_arguments,
)

DEMO_GOLD = "rlhf_lightning.data.demo.gold"


def doctor_arguments(settings: TrainSettings) -> bool | dict[str, Any]:
    """Return what `trainer_arguments` is given as `doctor`; False where nothing is judged.

    Raises:
        ConfigError: for gold as the second scorer, or a rollback without a best checkpoint.
    """
    doctor = settings.doctor
    if doctor is None or (settings.only_runs and not doctor.preflight):
        return False
    _refuse_gold(settings.evaluation.gold, doctor.second_scorer)
    monitor = settings.callbacks.checkpoint.monitor
    if doctor.actions is not None and doctor.actions.on_alarm == "rollback" and monitor is None:
        raise ConfigError(
            "doctor.actions.on_alarm=rollback: callbacks.checkpoint.monitor=null keeps none to go "
            "back to; set doctor/quality and callbacks.checkpoint.mode=max"
        )
    given = {"domains": doctor.harmful_domains, "patterns": doctor.refusals}
    refusals = Refusals(**{k: tuple(v) for k, v in given.items() if v is not None})
    arguments = {
        "thresholds": doctor.thresholds,
        "actions": doctor.actions,
        "second_scorer": None if doctor.second_scorer is None else doctor.second_scorer.build(),
        "second_every_n_iterations": doctor.second_every_n_iterations,
        "refusals": refusals,
        "preflight": doctor.preflight,
        "watches": not settings.only_runs,
    }
    return without_defaults(Doctor, arguments) or True


def _refuse_gold(gold: Target | None, second_scorer: Target | None) -> None:
    """Gold chooses no setting and no checkpoint, and the doctor does both."""
    known = {text for _, text in texts(gold and gold.node())}
    for _, text in texts(second_scorer and second_scorer.node()):
        ours = text == "rlhf_lightning.gold_scores" or text.startswith(DEMO_GOLD)
        if text in known or ours:
            raise ConfigError(
                f"doctor.second_scorer reads {text}, the gold reward, which only evaluation may "
                "see: use a judge or another reward model"
            )


def make_logger(settings: TrainSettings, folder: RunFolder) -> Any:
    """Return what `logger=` chose as a Lightning logger, or False where metrics.csv is enough."""
    kind = settings.logger.kind
    if kind == "tensorboard":
        return tensorboard_logger(folder)
    if kind != "wandb":
        return False
    config = public_config(settings.resolved, settings.written) | {
        "config_hash": settings.config_hash,
        "git_commit": git_commit(),
        "versions": installed_versions(),
    }
    return wandb_logger(
        folder,
        project=settings.logger.project,
        name=os.environ.get("WANDB_NAME") or f"{settings.name}/{folder.path.name}",
        group=settings.logger.group
        or os.environ.get("WANDB_RUN_GROUP")
        or sweep_group(settings.name),
        tags=settings.logger.tags,
        config=config,
        mode=settings.logger.mode,
    )


def sweep_group(name: str) -> str | None:
    """Return the name that the jobs of this sweep share, None outside of a multirun."""
    return f"{name}/{Path(HydraConfig.get().sweep.dir).name}" if in_sweep() else None


def assemble(settings: TrainSettings, folder: RunFolder) -> TrainingComponents:
    """Build what the settings describe; models are built later, in `configure_model`."""
    stage = settings.spec
    settings = with_vocabulary(settings)
    check_context_length(settings)
    chosen, rates = choose_rates(settings)
    settings = settings.updated(chosen) if chosen else settings
    module = make_module(settings)
    data = settings.data.build(tokenizer=module.tokenizer)
    data.setup()
    if stage.trains_policy and settings.safety is not None:
        encode_safety_prompts(  # of a file, asked at the end: fail before training
            settings.safety.build().records(),
            [module.tokenizer],
            max_prompt_length=prompt_length(settings),
            batch_size=settings.evaluation.batch_size,
            setting=f"data.{settings.data.prompt_length_key}",
        )
    own = rollout_callbacks(settings) if stage.rolls_out else []
    trainer = make_trainer(settings, folder, own)
    return TrainingComponents(settings, folder, data, module, trainer, rates)


def rollout_callbacks(settings: TrainSettings) -> list[L.Callback]:
    """Return the evaluation every few iterations, if there is one."""
    if (every := settings.evaluation.every_n_iterations) is None:
        return []
    asked = comparison_arguments(settings) | settings.evaluation.decoding
    asked["num_prompts"] = settings.evaluation.during_training
    return [PeriodicEvaluation(every_n_iterations=every, **asked)]


def make_module(settings: TrainSettings) -> Any:
    """Return the module: the call that `module` describes, with what other groups say."""
    stage, start, node = settings.spec, settings.start, settings.module.read()
    given = node.arguments | settings.all_hparams
    given["optimizer"] = settings.optimizer.read()
    given["schedule"] = settings.scheduler.read()
    given["generator"] = settings.rollout.read()
    if stage.rolls_out and settings.scorer is not None:
        given["reward"] = settings.scorer.read()
    module = node.call(**made(given))
    if module.source is not None and module.source.name == start:
        module.source = replace(module.source, key=f"artifacts.{stage.starts_from}")
    return module


def make_tokenizer(settings: TrainSettings) -> PreTrainedTokenizerBase:
    """Return the tokenizer of the start, or the one made for a model from scratch."""
    model = settings.model
    if settings.start is not None:
        return load_tokenizer(settings.start, **model.template, **model.origin)
    if model.tokenizer is None:
        told = f"model={model.name} from random weights needs model.tokenizer"
        start = f"+experiment={settings.stage} artifacts.{settings.spec.starts_from}=FOLDER"
        raise ConfigError(f"{told}: write it, or {start}, which starts from a model")
    tokenizer = with_template(model.tokenizer.build(), model.chat_template)
    return with_template_arguments(tokenizer, model.chat_template_arguments or {})


def with_vocabulary(settings: TrainSettings) -> TrainSettings:
    """Return the settings in which a model from scratch has the vocabulary of its tokenizer."""
    if settings.start is not None:
        return settings
    fields = vocabulary_of(make_tokenizer(settings))
    return settings.updated({f"model.from_scratch.{k}": v for k, v in fields.items()})


def choose_rates(settings: TrainSettings) -> tuple[dict[str, float], tuple[str, ...]]:
    """Return the learning rates that the settings leave open, by the size of the model.

    The size is that of the config of the model that is loaded; no weight is read.

    Returns:
        By dotted key, and a line for each rate for the first screen: its value, and why.

    Raises:
        ConfigError: if the config does not say how large the model is.
    """
    place, lora = f"module.{settings.stage}", settings.lora
    rates: dict[str, Kind] = {"learning_rate": settings.spec.rate, "value_learning_rate": "value"}
    values = {k: getattr(settings.hparams, k) for k in rates if hasattr(settings.hparams, k)}
    unset = [key for key, value in values.items() if value is None]
    count = _count(settings, f"{place}.{unset[0]}") if unset else 0
    for key in unset:
        values[key] = default_learning_rate(rates[key], count, lora=lora is not None)
    adapters = ", of which adapters are trained" if lora is not None else ""
    by_size = f"by the size of the model: {count:,} weights{adapters}"
    lines = (f"{k} {v:g}, {by_size if k in unset else 'as set'}" for k, v in values.items())
    return {f"{place}.{key}": values[key] for key in unset}, tuple(lines)


def _count(settings: TrainSettings, key: str) -> int:
    """Return the weights of the causal language model that is loaded; nothing is allocated."""
    config = model_config(settings)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                config, trust_remote_code=settings.model.trust_remote_code
            )
        return sum(parameter.numel() for parameter in model.parameters())
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, ImportError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"{key} follows the size of {settings.start or 'the model'}, which its config does not "
            f"give ({reason}): set {key}=1.0e-5 or what suits the model, as docs/models.md has it"
        ) from error


def make_trainer(
    settings: TrainSettings, folder: RunFolder, own: Sequence[L.Callback]
) -> L.Trainer:
    """Return the Trainer: one epoch of `num_iterations` batches, our callbacks, our checkpoints."""
    given = settings.trainer
    trainer = L.Trainer(
        **trainer_arguments(
            folder.path,
            **run_arguments(settings),
            checkpoint=checkpoint_arguments(settings),
            logger=make_logger(settings, folder),
            callbacks=[
                *own,
                SameConfiguration(settings.config_hash, str(folder.path)),
                *(node.build() for node in settings.callbacks.extra.values()),
            ],
            record=False,  # of the whole command, by app/train.py
            name=settings.name,
            accelerator=given.accelerator,
            devices=given.devices,
            num_nodes=given.num_nodes,
            precision=given.precision,
            strategy=make_strategy(settings.strategy.model_dump(), num_devices=given.world_size),
            limit_val_batches=given.limit_val_batches if not settings.spec.rolls_out else 0,
        )
    )
    # Lightning's handlers exchange data inside the handler, which hangs if only one rank gets the
    # signal, and requeue Slurm jobs from another checkpoint.
    cast(Any, trainer)._signal_connector.register_signal_handlers = lambda: None
    return trainer


def run_arguments(settings: TrainSettings) -> dict[str, Any]:
    """Return the arguments of `trainer_arguments` that the settings say as plain values."""
    given, early = settings.callbacks, settings.callbacks.early_stopping
    return {
        "max_iterations": settings.trainer.limit_train_batches,
        "validations": settings.trainer.validations if not settings.spec.rolls_out else 0,
        "checkpoint_every_n_iterations": given.checkpoint.every_n_iterations,
        "samples_every_n_iterations": given.samples.every_n_iterations,
        "num_samples": given.samples.num_samples,
        "doctor": doctor_arguments(settings),
        "early_stopping": None if early is None else early.model_dump(exclude_unset=True),
    }


def checkpoint_arguments(settings: TrainSettings) -> dict[str, Any]:
    """Return the further arguments of `IterationCheckpoint`."""
    kept = settings.callbacks.checkpoint.model_dump(exclude={"every_n_iterations"})
    if settings.only_runs and str(kept["monitor"]).startswith("doctor/"):
        kept["monitor"] = None  # nothing is watched
    return without_defaults(IterationCheckpoint, kept)


def without_defaults(call: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that are not the defaults of a class or function."""
    usual = {p.name: p.default for p in inspect.signature(call).parameters.values()}
    if call is Doctor:
        usual |= {"thresholds": DoctorThresholds(), "refusals": Refusals()}
    return {name: value for name, value in given.items() if not _equal(value, usual.get(name, ...))}


def _equal(value: Any, usual: Any) -> bool:
    if isinstance(value, list | tuple) and isinstance(usual, list | tuple):
        return list(value) == list(usual)
    return type(value) is type(usual) and bool(value == usual)


@contextmanager
def computing(model: ModelSettings) -> Iterator[None]:
    """Compute inside by these settings of a model; see the functions that are called."""
    with (
        set_cpu_kernels(model.cpu_kernels),
        gpu_kernels(model.kernels),
        micro_batching(model.micro_batches),
        set_cpu_threads(model.cpu_threads),
        set_attention_backends(model.attention_backends),
    ):
        yield


@contextmanager
def begin_run(
    settings: EvaluateSettings | CollectSettings, folder: RunFolder, title: str, *, resumes: bool
) -> Iterator[Summary]:
    """Begin a run in a folder that is then its alone; give its summary, and write how it fails.

    Args:
        settings: settings of the command.
        folder: folder of the run.
        title: the kind of run in words.
        resumes: whether `resume=auto` continues it.
    """
    stage, digest = settings.stage, settings.config_hash
    summary = new_summary(stage, seed=settings.seed, config_hash=digest, title=title)
    if isinstance(settings, EvaluateSettings):
        summary = replace(summary, judged=not settings.only_runs)
    claimed = claim_run(folder.path, lambda: check_folder(settings, folder))
    with claimed, computing(settings.model):
        try:
            write_summary(folder, summary)
            quieten()
            set_matmul_precision(settings.trainer.matmul_precision)
            yield summary
        except BaseException as error:
            record_end(folder, summary, error, resumes=resumes)
            raise


def check_run(settings: TrainSettings) -> None:
    """Check everything else that can be known before a model is trained or loaded.

    Nothing is read but the file of a reward function. Data module, optimizer, schedule and scorers
    without a model are built once.

    Raises:
        ConfigError: with the place, what it got and what it wants.
    """
    checkpoint, acts = settings.callbacks.checkpoint, settings.select("doctor.actions") is not None
    if checkpoint.mode == "max" and checkpoint.monitor is None and not acts:
        raise ConfigError("callbacks.checkpoint.mode=max needs callbacks.checkpoint.monitor=METRIC")
    try:
        mode_of(checkpoint.monitor, checkpoint.mode)
    except ValueError as error:
        raise ConfigError(f"callbacks.checkpoint.{error}") from error
    engine, lora = settings.rollout.read("rollout").call, settings.lora
    if lora is not None and lora.quantization != "none" and engine is VllmGenerator:
        raise ConfigError(QUANTIZED)
    named = [(key, settings.select(key)) for key in ("data.path", "ckpt_path")]
    for key, path in (*named, *(("data.also", path) for path in settings.data.get("also") or ())):
        if path is not None and not Path(str(path)).exists():
            wanted = "checkpoint" if key == "ckpt_path" else "file or folder of records"
            raise ConfigError(f"{key}={path} does not exist: give a {wanted}")
    with built("data", settings.data):
        settings.data.build(tokenizer=None)
    with built("optimizer", settings.optimizer):
        for key, value in settings.optimizer.arguments.items():
            for number in value if isinstance(value, list) else [value]:
                if type(number) in (int, float):
                    fitting(key, number, float)
        check_optimizer(settings.optimizer.build()([torch.nn.Parameter(torch.zeros(1))], lr=1e-3))
    with built("scheduler", settings.scheduler):
        settings.scheduler.build()
    if settings.safety is not None:
        with built("safety", settings.safety):
            settings.safety.build()
    scorer = settings.scorer if settings.spec.rolls_out else None
    for node in [] if scorer is None else nodes(scorer.read("scorer")):
        if all(getattr(one.call, "loads_no_model", False) for one in nodes(node)):
            with built(node.where, node):
                node.make()


def check_devices(settings: TrainSettings) -> None:
    """Check that this machine has the accelerator that is asked for.

    Raises:
        ConfigError: if it has none, or fewer devices.
    """
    kind, count = settings.trainer.accelerator, settings.trainer.devices
    found = {"cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    found["gpu"] = max(found.values())
    if count > found.get(kind, count):
        raise ConfigError(
            f"trainer.accelerator={kind} trainer.devices={count}, and this machine has "
            f"{found[kind]}: use fewer, or trainer.accelerator=cpu"
        )


@contextmanager
def built(where: str, target: Target | Node) -> Iterator[None]:
    """Name the place and the key where building `target` fails.

    Raises:
        ConfigError: then.
    """
    try:
        yield
    except Exception as error:  # torch's Adam raises an IndexError at betas=''
        text = " ".join(str(error).split())
        if any(text.startswith((f"{key}=", f"{key} is ")) for key in target.arguments):
            text = f"{where}.{text}"
        if where not in text:
            given = ", ".join(f"{key}={value}" for key, value in target.arguments.items())
            text = f"{where}: {text} (given: {given})"
        raise ConfigError(text) from error
