"""A configuration as a short Python program of public names that trains the same, to the bit.

`python -m rlhf_lightning.train +experiment=ppo ... --as-python` prints it.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from datetime import timedelta
from pathlib import Path
from textwrap import indent
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy

import rlhf_lightning
from rlhf_lightning.app.build import checkpoint_arguments, run_arguments, without_defaults
from rlhf_lightning.app.config.compose import ConfigError
from rlhf_lightning.app.config.groups import Target
from rlhf_lightning.app.config.settings import TrainSettings
from rlhf_lightning.app.config.targets import Node
from rlhf_lightning.callbacks.periodic_evaluation import PeriodicEvaluation
from rlhf_lightning.callbacks.trainer_arguments import trainer_arguments
from rlhf_lightning.distributed.strategy import FSDP2Strategy
from rlhf_lightning.evaluation.compare import compare
from rlhf_lightning.evaluation.normalization import normalize_reward_model
from rlhf_lightning.hparams import SamplingHparams
from rlhf_lightning.models.attention import attention_backends
from rlhf_lightning.models.cpu_kernels import cpu_kernels
from rlhf_lightning.models.gpu_kernels import gpu_kernels
from rlhf_lightning.models.micro_batching import micro_batching
from rlhf_lightning.modules.export import export_model
from rlhf_lightning.modules.optimization import Schedule
from rlhf_lightning.rollout.generators.captured import CapturedGenerator
from rlhf_lightning.rollout.scorers.base import FunctionScorer, RewardModelScorer

WIDTH = 100
SOME_GPU = ("cuda", "gpu")
_ADAMW = {"betas": (0.9, 0.999), "eps": 1e-5, "weight_decay": 0.0, "fused": True}  # the modules'


class Code(str):
    """An expression of the program, in place of a value."""

    __slots__ = ()


class Calls:
    """Writes values and calls as expressions, and remembers what they import."""

    def __init__(self) -> None:
        self.imports: dict[str, set[str]] = defaultdict(set)

    def name(self, thing: Any) -> str:
        """Return the name of a class or function: the public one where it has one."""
        if inspect.ismethod(thing):  # of a class
            return f"{self.name(thing.__self__)}.{thing.__name__}"
        module, name = thing.__module__, thing.__qualname__
        if name in rlhf_lightning.__all__ and getattr(rlhf_lightning, name) is thing:
            module = "rlhf_lightning"
        elif module.startswith("torch.optim"):
            module = "torch.optim"
        self.imports[module].add(name.partition(".")[0])
        return str(name)

    def call(self, thing: Any, /, *args: Any, **kwargs: Any) -> Code:
        """Return a call, without the arguments that are the defaults."""
        return self.written(self.name(thing), *args, **without_defaults(thing, kwargs))

    def written(self, name: str, /, *args: Any, **kwargs: Any) -> Code:
        """Return a call of a name; broken into lines where it is long."""
        parts = [self.value(arg) for arg in args]
        parts += [f"{key}={self.value(value)}" for key, value in kwargs.items()]
        return Code(_bracketed(f"{name}(", parts, ")"))

    def value(self, value: Any) -> str:
        """Return a value as an expression."""
        if isinstance(value, Code):
            return value
        if isinstance(value, Target):
            value = value.read()
        if isinstance(value, Node):
            return self._node(value)
        if isinstance(value, Mapping):
            items = [f"{self.value(key)}: {self.value(inside)}" for key, inside in value.items()]
            return _bracketed("{", items, "}")
        if isinstance(value, list | tuple):
            return _bracketed("[", [self.value(inside) for inside in value], "]")
        if isinstance(value, timedelta):
            self.imports["datetime"].add("timedelta")
            return f"timedelta(minutes={value / timedelta(minutes=1):g})"
        if isinstance(value, torch.dtype):
            self.imports["torch"].add("")
        elif is_dataclass(value) and not isinstance(value, type):
            given = {f.name: getattr(value, f.name) for f in fields(value) if f.init}
            usual = {f.name: f.default for f in fields(value) if f.default is not MISSING}
            changed = {k: v for k, v in given.items() if k not in usual or v != usual[k]}
            return self.written(self.name(type(value)), **changed)
        elif isinstance(value, Path):
            value = str(value)
        is_plain = isinstance(value, str) and value.isprintable() and not set('"\\') & set(value)
        return f'"{value}"' if is_plain else repr(value)

    def _node(self, node: Node) -> str:
        if node.is_itself:
            return self.name(node.call)
        given = without_defaults(node.call, node.arguments)
        if not node.is_partial:
            return self.written(self.name(node.call), **given)
        self.imports["functools"].add("partial")
        return self.written("partial", Code(self.name(node.call)), **given)

    def import_lines(self) -> str:
        """Return the imports, in the order of isort."""
        plain = [f"import {module}" for module, names in self.imports.items() if "" in names]
        lines = []
        for module, named in sorted(self.imports.items()):
            if names := sorted(named - {""}):
                line = f"from {module} import {', '.join(names)}"
                long = _bracketed(f"from {module} import (", names, ")")
                lines.append(line if len(line) <= WIDTH else long)
        return "\n".join([*sorted(plain), *lines])


def _bracketed(start: str, parts: Sequence[str], end: str) -> str:
    line = f"{start}{', '.join(parts)}{end}"
    if len(line) <= WIDTH - 12 and "\n" not in line:
        return line
    inside = "".join(f"    {line}\n" for part in parts for line in f"{part},".split("\n"))
    return f"{start}\n{inside}{end}"


def as_python(settings: TrainSettings, overrides: Sequence[str]) -> str:
    """Return the program.

    Args:
        settings: settings of the command.
        overrides: overrides of its command line, for the first line.

    Raises:
        ConfigError: for a setting that has no argument in Python, with its key.
    """
    calls = Calls()
    calls.imports["lightning as L"].add("")
    folder = Path(settings.paths.outputs) / settings.name / "program"
    lines = [f"L.seed_everything({settings.seed}, workers=True)"]
    if settings.model.cpu_threads is not None and settings.trainer.accelerator not in SOME_GPU:
        calls.imports["torch"].add("")
        lines.append(f"torch.set_num_threads({settings.model.cpu_threads})")
    _refuse(settings)
    lines += [f"module = {_module(settings, calls)}"]
    lines += [f"data = {_data(settings, calls)}", f"trainer = {_trainer(settings, folder, calls)}"]
    lines.append("trainer.fit(module, data)")
    lines += _end(settings, folder, calls)
    command = " ".join(("python -m rlhf_lightning.train", *overrides)).replace("\\", "\\\\")
    if command.endswith('"') or '"""' in command:
        command = command.replace('"', '\\"')
    body = "\n".join(lines)
    if contexts := _contexts(settings, calls):
        body = f"with {', '.join(contexts)}:\n{indent(body, '    ')}"
    return f'"""{command}"""\n\n{calls.import_lines()}\n\n{body}\n'


def _contexts(settings: TrainSettings, calls: Calls) -> list[Code]:
    """Return the kernels and micro-batches inside which all is computed, if not as by default."""
    model = settings.model
    ways = (
        (gpu_kernels, model.kernels),
        (micro_batching, model.micro_batches),
        (attention_backends, model.attention_backends),
    )
    found = [] if model.cpu_kernels else [calls.call(cpu_kernels, enabled=False)]
    return found + [calls.call(context, way=way) for context, way in ways if way != "auto"]


def _refuse(settings: TrainSettings) -> None:
    """Refuse settings that no argument says.

    Raises:
        ConfigError: with the first key.
    """
    left: dict[str, tuple[Any, Any]] = {
        "ckpt_path": (settings.ckpt_path, None),
        "resume": (settings.resume, "never"),
    }
    if (ends := settings.select("doctor.actions.on_alarm")) == "rollback":
        left["doctor.actions.on_alarm"] = (ends, "none")
    if settings.logger.kind == "wandb":
        for name in ("project", "group", "tags", "mode"):
            usual = type(settings.logger).model_fields[name].default
            left[f"logger.{name}"] = (getattr(settings.logger, name), usual)
    for key, (value, usual) in left.items():
        if value != usual:
            raise ConfigError(f"{key}={value} has no argument in Python: run it by rlhf-train")


def _module(settings: TrainSettings, calls: Calls) -> Code:
    """Return the module: the call that `module` describes, with what other groups say."""
    node = settings.module.read("module")
    given: dict[str, Any] = node.arguments | settings.all_hparams
    for name, value in settings.all_hparams.items():
        if value == type(value)():
            del given[name]
    schedule = settings.scheduler.read("scheduler")
    if schedule.call is not Schedule or without_defaults(Schedule, schedule.arguments):
        given["schedule"] = schedule
    optimizer = settings.optimizer.read("optimizer")
    plain = {k: tuple(v) if isinstance(v, list) else v for k, v in optimizer.arguments.items()}
    if optimizer.call is not torch.optim.AdamW or plain != _ADAMW:
        given["optimizer"] = optimizer
    generator = settings.rollout.read("rollout")
    changed = without_defaults(CapturedGenerator, generator.arguments)
    if generator.call is not CapturedGenerator or changed:
        given["generator"] = generator
    if settings.lora is not None:
        given["lora"] = settings.lora
    if settings.spec.rolls_out:
        given["reward"] = _reward(settings)
    if (fields_ := given.get("from_scratch")) is not None:  # the tokenizer says the vocabulary
        given["from_scratch"] = {k: v for k, v in fields_.items() if v != "???"}
    given["chat_template_arguments"] = given.get("chat_template_arguments") or None
    order = [name for name in inspect.signature(node.call).parameters if name in given]
    return calls.call(node.call, **{name: given[name] for name in order})


def _reward(settings: TrainSettings) -> Any:
    """Return the reward as the name of a model or of a function in a file, else as its scorer."""
    scorer = settings.scorer
    assert scorer is not None  # of a stage that rolls out
    found = scorer.read("scorer")
    if found.call is RewardModelScorer:
        load = found.arguments["load"].arguments
        usual = {"micro_batch_size": None, "policy": settings.start, "source": load["source"]}
        rest = {k: v for k, v in found.arguments.items() if k != "load"}
        if rest == usual and load.get("precision", "32-true") == "32-true" and len(load) <= 2:
            return load["source"]
    if found.call is FunctionScorer and set(scorer.arguments) == {"function"}:
        function = str(scorer.get("function"))
        return function if function.rpartition(":")[0].endswith(".py") else scorer
    return scorer


def _data(settings: TrainSettings, calls: Calls) -> Code:
    node = settings.data.read("data")
    given = {k: v for k, v in node.arguments.items() if k not in ("source", "tokenizer")}
    if given.get("seed") == settings.seed:  # the module's
        del given["seed"]
    if given.get("kind") == node.call.kinds[0]:
        del given["kind"]
    given = without_defaults(node.call, given)
    source = node.arguments["source"]
    return calls.written(calls.name(node.call), source, Code("module.tokenizer"), **given)


def _trainer(settings: TrainSettings, folder: Path, calls: Calls) -> Code:
    given, trainer = run_arguments(settings), settings.trainer
    doctor = settings.doctor
    if isinstance(given["doctor"], dict) and doctor is not None and doctor.second_scorer:
        given["doctor"] |= {"second_scorer": doctor.second_scorer}
    early = given["early_stopping"]
    given["early_stopping"] = early["patience"] if early and set(early) == {"patience"} else early
    given["checkpoint"] = checkpoint_arguments(settings) or None
    if settings.spec.rolls_out:
        del given["validations"]
    if settings.logger.kind in ("wandb", "tensorboard"):
        given["logger"] = settings.logger.kind
    callbacks: list[Any] = list(settings.callbacks.extra.values())
    evaluation = settings.evaluation
    if evaluation.every_n_iterations is not None:
        periodic = {
            "every_n_iterations": evaluation.every_n_iterations,
            "num_prompts": evaluation.during_training,
            **_asked(settings),
        }
        callbacks.append(calls.call(PeriodicEvaluation, **periodic))
    given = without_defaults(trainer_arguments, given | {"callbacks": callbacks or None})
    given["devices"] = trainer.devices
    limit = None if settings.spec.rolls_out else trainer.limit_val_batches
    others = {"accelerator": "auto", "num_nodes": 1, "precision": "32-true"}
    given |= {k: getattr(trainer, k) for k, v in others.items() if getattr(trainer, k) != v}
    given |= {} if limit is None else {"limit_val_batches": limit}
    if (strategy := _strategy(settings, calls)) is not None:
        given["strategy"] = strategy
    arguments = calls.written(calls.name(trainer_arguments), str(folder), **given)
    return Code(f"L.Trainer(**{arguments})")


def _strategy(settings: TrainSettings, calls: Calls) -> str | None:
    strategy = settings.strategy
    if strategy.name == "auto":
        return None
    timeout = timedelta(minutes=strategy.timeout_minutes)
    if strategy.name == "ddp":
        with_it = calls.call(DDPStrategy, timeout=timeout)
        return with_it if "timeout" in with_it else "ddp"
    return calls.call(
        FSDP2Strategy,
        shard_over=strategy.shard_over,
        cpu_offload=strategy.cpu_offload,
        sharded_checkpoints=strategy.checkpoint == "sharded",
        gradient_sync=strategy.gradient_sync or "micro_batch",
        compute_dtype=getattr(torch, strategy.compute_dtype or "float32"),
        timeout=timeout,
    )


def _asked(settings: TrainSettings) -> dict[str, Any]:
    """Return how held-out prompts are answered, without what is as in training."""
    evaluation = settings.evaluation
    usual = settings.all_hparams.get("sampling") or SamplingHparams()
    changed = {k: v for k, v in evaluation.decoding.items() if v != getattr(usual, k, None)}
    return {
        "gold": evaluation.gold,
        "safety": settings.safety,
        "answers_per_prompt": evaluation.answers_per_prompt,
        "batch_size": min(evaluation.batch_size, evaluation.num_prompts),
        **changed,
    }


def _end(settings: TrainSettings, folder: Path, calls: Calls) -> list[str]:
    """Return what follows the training: normalization, the comparison, the export."""
    lines: list[str] = []
    evaluation, asked = settings.evaluation, _asked(settings) | {"seed": settings.seed}
    judged = evaluation.gold is not None or settings.scorer is not None
    if not settings.spec.trains_policy and settings.hparams.normalization_samples:
        names = inspect.signature(normalize_reward_model).parameters
        given = {key: value for key, value in asked.items() if key in names}
        given |= {"batch_size": evaluation.batch_size}
        given = without_defaults(normalize_reward_model, given)
        name = calls.name(normalize_reward_model)
        lines.append(calls.written(name, Code("module"), Code("data"), **given))
    if settings.spec.trains_policy and settings.start is not None and judged:
        given = {
            "gates": settings.gates or None,
            "num_prompts": evaluation.num_prompts,
            "num_samples": evaluation.num_samples,
            **asked,
        }
        own = (Code("module"), settings.start, Code("data"))
        given = without_defaults(compare, given)
        if settings.scorer is not None and not settings.spec.rolls_out:
            given = dict(reward=settings.scorer, **given)
        lines.append(f"print({calls.written(calls.name(compare), *own, **given)})")
    given = {"dtype": torch.bfloat16} if settings.export.dtype == "bf16" else {}
    name, module = calls.name(export_model), Code("module")
    return [*lines, str(calls.written(name, module, str(folder / "export"), **given))]
