"""The models a stage starts from: found, or trained first where they are built-in ones.

Where a run only shows that it runs, what is missing is made of random weights.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence, Set
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from rlhf_lightning.app.command_line import say
from rlhf_lightning.app.config.compose import ConfigError, choices, config_dirs, word
from rlhf_lightning.app.config.groups import MODELS
from rlhf_lightning.app.config.settings import RunSettings, TrainSettings
from rlhf_lightning.app.config.validate import SHARED, is_loaded, load_settings, without_unread
from rlhf_lightning.data.demo.source import DemoSource
from rlhf_lightning.data.demo.vocabulary import demo_tokenizer
from rlhf_lightning.distributed.launch import own_environment
from rlhf_lightning.models.adapter_files import save_adapter
from rlhf_lightning.models.building import seeded_init
from rlhf_lightning.models.factory import head_std, load_base, load_policy
from rlhf_lightning.models.heads import ScalarHeadModel, scalar_head
from rlhf_lightning.models.lora import add_scalar_model
from rlhf_lightning.models.ppo_models import ADAPTER
from rlhf_lightning.models.quiet import quieten
from rlhf_lightning.modules.base import RLHFModule
from rlhf_lightning.modules.export import save_hf_model
from rlhf_lightning.rollout.scorers.hparams import is_address
from rlhf_lightning.runs.lock import artifact_lock, replacing_folder
from rlhf_lightning.runs.manifest import is_available, no_model, source_fingerprint, write_manifest
from rlhf_lightning.text.tokenizers import load_tokenizer, stop_ids, vocabulary_of, with_template

SettingsT = TypeVar("SettingsT", bound=RunSettings)


def prepare_inputs(
    settings: SettingsT, overrides: list[str], *, kinds: Sequence[str] = MODELS
) -> SettingsT:
    """Make sure that the models in `artifacts` exist; train the built-in ones that do not.

    A missing default of the built-in world is trained by a child process, one device, under a
    file lock on its folder. With `debug=fast` a missing default of any model is not trained.

    Args:
        settings: settings of the command.
        overrides: overrides of the command line; those that concern every stage are passed to the
            child.
        kinds: keys of `artifacts` to check.

    Returns:
        The settings, with untrained models where `debug=fast` needs some.

    Raises:
        ConfigError: for a missing path that the user gave, naming the command that makes it.
        RuntimeError: if a child fails.
    """
    for kind in kinds:
        source = settings.select(f"artifacts.{kind}")
        if source is None or is_available(source) or not is_loaded(settings, source):
            continue
        if kind == "teacher" and is_address(source):
            continue  # a server: it is asked when it is needed
        folder = Path(source)
        has_recipe = kind in choices("experiment")
        usual = has_recipe and source == f"{settings.select('model.folder')}/{kind}"
        base = settings.select("artifacts.base") or settings.select("model.base")
        if settings.only_runs and usual and (base or not _recipe(kind).spec.trains_policy):
            changed = _untrained(kind, settings, base)
            settings = settings.updated(changed) if changed else settings
            continue
        if not (usual and str(settings.select("dataset.name")).startswith("demo_")):
            told = f"artifacts.{kind}={no_model(source, 'give a folder or hub name')}"
            starts_value = settings.select("module.value") == source  # perhaps nothing else
            if starts_value and not is_loaded(settings.updated({"module.value": None}), source):
                told += " (module.value=null module.value_head=zero does without)"
            if has_recipe:
                command = f"+experiment={shlex.join(words_for(settings, kind, overrides))}"
                told += f", or make it with  python -m rlhf_lightning.train {command}"
            raise ConfigError(told)
        with artifact_lock(folder, report=say):
            if is_available(source):
                continue
            say(f"The {kind} model of the built-in world is not in {folder}: training it first.")
            _train(kind, settings, overrides)
    return settings


@cache
def _recipe(kind: str) -> TrainSettings:
    """Return the settings of the experiment that makes a `kind` model of the built-in world."""
    return load_settings(TrainSettings, "train", [f"+experiment={kind}"])


def check_world(settings: Any, policies: Iterable[str | None]) -> None:
    """Refuse the built-in world's records for a policy whose tokenizer does not know its words.

    They are what every command reads if no dataset is chosen. A run that only shows that it runs
    may read them.

    Args:
        settings: settings of a command.
        policies: folders and hub names; what is missing is not looked at.

    Raises:
        ConfigError: with the policy and the words to write.
    """
    if settings.only_runs or settings.dataset.source.read().call is not DemoSource:
        return
    words = demo_tokenizer().get_vocab().keys()
    for policy in filter(is_available, filter(None, policies)):
        known: Set[str] = words  # of what cannot be read: loading it names what it lacks
        with suppress(OSError, ValueError):
            known = load_tokenizer(policy).get_vocab().keys() if Path(policy).is_dir() else set()
        if not words <= known:
            raise ConfigError(
                f"dataset=demo is the built-in world, and {policy} is no model of it: give your "
                "records, dataset=files dataset.name=NAME dataset.path=FILE model=pretrained"
            )


def words_for(
    settings: RunSettings, kind: str, overrides: Sequence[str], *, other_file: bool = True
) -> list[str]:
    """Return an experiment and the words by which it makes a `kind` model for these settings.

    Args:
        settings: settings of a command.
        kind: key of `artifacts`, or experiment.
        overrides: overrides of its command line.
        other_file: ask for another file where that of the dataset has no records for it.
    """
    sibling = "_".join([kind, *settings.name.split("_")[1:]])
    experiment = sibling if sibling in choices("experiment") else kind
    recipe = _recipe(kind)
    models = recipe.artifacts.models().items()
    used = [name for name, source in models if name != kind and is_loaded(recipe, source)]
    starts = (f"artifacts.{name}=" for name in used)
    kept = (*SHARED, "strategy", "trainer.", "seed=", "debug=fast", "paths.apart=", *starts)
    words = _read_by(experiment, [w for w in overrides if w.lstrip("+").startswith(kept)])
    start = f"artifacts.{recipe.spec.starts_from}"
    has_start = any(map(settings.select, (start, "model.base")))
    if experiment == kind and recipe.start is not None and not has_start:
        words.append(f"{start}=NAME")
    other = settings.select(f"dataset.{kind}_dataset")
    if other is not None and not any(word.startswith("dataset.family=") for word in words):
        words = [f"dataset={other}" if word.startswith("dataset=") else word for word in words]
        words = [word for word in words if not word.lstrip("+").startswith("dataset.")]
    elif other_file and settings.select("dataset.path") is not None:
        file = word("dataset.path", file_for(settings, kind))
        words = [file if one.startswith("dataset.path=") else one for one in words]
    return [experiment, *words, *config_dirs()]


def has_records(settings: Any, kind: str) -> bool:
    """Return whether the dataset's files have the records that a `kind` model learns from."""
    path, records = settings.select("dataset.path"), _recipe(kind).data.get("kind")
    if path is None or records is None or not Path(path).exists():
        return True
    try:
        return bool(settings.dataset.source.build().records(records, "train"))
    except ValueError:
        return False


def file_for(settings: Any, kind: str) -> str:
    """Return the file of the dataset, if a `kind` model learns from it, or one beside it.

    That is named by its records, such as `preferences.jsonl`; where it is missing, the word for it
    in capitals takes its place.
    """
    path, records = Path(settings.select("dataset.path")), str(_recipe(kind).data.get("kind"))
    beside = path.with_name(records + "".join(path.suffixes))
    if has_records(settings, kind):
        return str(path)
    return str(beside) if beside.is_file() else records.upper()


def _untrained(kind: str, settings: RunSettings, base: str | None) -> dict[str, str | None]:
    """Make a model of random weights; a pretrained base takes the place of a missing policy."""
    source = str(settings.select(f"artifacts.{kind}"))
    module = _recipe(kind).spec
    if module.trains_policy and not settings.select("model.from_scratch"):
        say(f"There is no {kind} model in {source}: this run starts from {base}.")
        return {f"artifacts.{kind}": base}
    with artifact_lock(Path(source), report=say):
        if not is_available(source):
            say(f"There is no {kind} model in {source}: one of random weights is made.")
            write_untrained(module, Path(source), settings)
    return {}


def training_words(experiment: str, settings: RunSettings, overrides: Sequence[str]) -> list[str]:
    """Return the words of a command line that also concern a stage that it trains first."""
    shared = [word for word in overrides if word.lstrip("+").startswith(SHARED)]
    return [f"seed={settings.seed}", *_read_by(experiment, shared)]


def _read_by(experiment: str, words: list[str]) -> list[str]:
    """Return those of some words that an experiment reads."""
    return list(without_unread([f"+experiment={experiment}", *words], words)[1:])


def _train(kind: str, settings: RunSettings, overrides: list[str]) -> None:
    command = [sys.executable, "-m", "rlhf_lightning.train", *config_dirs()]
    command += [f"+experiment={kind}", *training_words(kind, settings, overrides)]
    code = subprocess.run(command, check=False, env=own_environment()).returncode
    if code or not is_available(str(settings.select(f"artifacts.{kind}"))):
        how = f"failed with exit status {code}" if code else "made no model"
        raise RuntimeError(f"training the {kind} model {how}: {' '.join(command[1:])}")


_TINY = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128}
_TINY |= {"num_hidden_layers": 2, "num_attention_heads": 4}
_TINY |= {"max_position_embeddings": 1 << 17}  # more than any policy reads


def write_untrained(module: type[RLHFModule], folder: Path, settings: Any) -> None:
    """Write a model folder of random weights, with a manifest.

    Args:
        module: class that trains such models: a policy has the tokenizer of `model`, a reward model
            that of the policy that it starts from.
        folder: a new folder.
        settings: settings of a command that has a model.
    """
    quieten()
    model = settings.model
    policy = None if module.trains_policy else settings.artifacts.of(module.starts_from)
    if policy is None:
        tokenizer = with_template(model.tokenizer.build(), model.chat_template)
    else:
        tokenizer = load_tokenizer(policy, **model.template, **model.origin)
    fields = (model.from_scratch or _TINY) | vocabulary_of(tokenizer)
    drawn: Any = load_policy(from_scratch=fields, seed=settings.seed)
    stops = stop_ids(tokenizer, policy, revision=model.revision)
    with replacing_folder(folder) as staging:
        if not module.trains_policy:
            size = drawn.model.get_output_embeddings().in_features
            with seeded_init(settings.seed):
                head = scalar_head(size, init_std=head_std(size, "reward"))
            drawn = ScalarHeadModel(drawn.model.base_model, head)
        save_hf_model(drawn, tokenizer, staging, drawn.state_dict(), stop_ids=stops)
        if policy is not None and settings.select("lora") is not None:
            _save_adapter(policy, staging / ADAPTER, settings)
        write_manifest(staging, stage=module.stage, run="none")


def _save_adapter(policy: str, folder: Path, settings: Any) -> None:
    model = settings.model
    base = load_base(policy, settings.lora, **model.origin)
    std = head_std(base.hidden_size, "reward")
    adapted = add_scalar_model(base, "reward", init_std=std, seed=settings.seed)
    print_ = source_fingerprint(policy, model.revision)
    save_adapter(adapted, folder, adapted.state_dict(), base=policy, base_fingerprint=print_)
