"""The short ways in: `rlhf-train EXPERIMENT MODEL FILE`, `--reward` and `--config run.yaml`.

They become the overrides that they stand for; what MODEL and FILE stand for is read in the
configuration of the experiment, without torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from omegaconf import OmegaConf

from rlhf_lightning.app.config.compose import (
    COMPOSE_ERRORS,
    CONFIG_DIR,
    TRAINING,
    ConfigError,
    at,
    choices,
    config_dirs,
    given,
    keys_of,
    primary,
    quoted,
    values_of,
    word,
)
from rlhf_lightning.app.config.errors import ADDED, OF_TRAINING, composition
from rlhf_lightning.misfit import did_you_mean, near_path
from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.manifest import is_adapter, is_available, no_model, of_adapter
from rlhf_lightning.runs.reading import read_json, read_yaml

_ENDINGS = re.compile(r"(\.(jsonl?|csv|tsv|parquet|arrow|gz))+$")
_HYDRA_TAKES_A_WORD = ("--cfg", "-c", "--info", "-i", "--package", "-p")
_REWARDS = "--reward FILE.py:NAME, several of them, or one --reward-model FOLDER"
_WITH_VALUE = (  # flags, ours and Hydra's
    *("--reward", "--reward-model", "--config", "--recipe", "--cfg", "--info", "--package"),
    *("--config-dir", "--config-path", "--config-name", "--experimental-rerun"),
)
_FLAGS = (*_WITH_VALUE, "--as-python", "--resolve", "--run", "--multirun", "--hydra-help")
_SAMPLED = "module.sampling.max_new_tokens"
_HALVES = ("data.max_prompt_length", _SAMPLED)
_WHOLE, _ANSWERED = "data.max_length", "evaluation.max_new_tokens"
FITTED = (*_HALVES, _WHOLE, _ANSWERED)
TYPED: list[str] = []  # the short command line that was spelled out last, its reward behind it
_SAYS_LENGTHS = re.compile(r"\+*((dataset|model|preset)=|[\w.]*(lengths\b|max_\w+))")
FOLDERS = "config_dir"
# By words of a pipeline's command line: all trainings, or a stage.
ADDRESSED: tuple[str, ...] = tuple(primary("pipeline")["overrides"])
_REWARD = re.compile(
    r"((?P<file>[^=]+\.py):)?(?P<name>(?!\S*\.py(=|$))[\w.]+)(=(?P<weight>-?\d*\.?\d+))?"
)


class Experiment(NamedTuple):
    """An experiment, as the short command line names what it starts from and reads.

    Args:
        name: its name.
        start: key of the model that it starts from; "" of random weights.
        records: kind of the records in its file.
        module: settings of its module, with their interpolations.
        scorer: those of its scorer; None without one.
        needs_reward: whether that is a reward model.
        others: keys of the further models that it needs.
    """

    name: str
    start: str
    records: str
    module: Mapping[str, Any]
    scorer: Mapping[str, Any] | None
    needs_reward: bool
    others: Sequence[str]

    def example(self) -> list[str]:
        """Return the words of MODEL and FILE, and of a reward where one is needed."""
        words = short_words(self.name, self.start, "MODEL", "FILE") if self.start else []
        reward = self.reward_words(["reward.py:score"]) if self.start and self.needs_reward else []
        return [*words, *reward] or [f"+experiment={self.name}"]

    def reward_words(self, functions: Sequence[str]) -> list[str]:
        """Return the words of reward functions, which take the place of a reward model."""
        zero = ["module.value_head=zero"] * ("value_head" in self.module)
        return [*scorer_words(functions), "artifacts.reward=null", *zero]


def short_words(experiment: str, start: str, model: str, file: str) -> list[str]:
    """Return what EXPERIMENT MODEL FILE stands for; without a file EXPERIMENT MODEL.

    Args:
        experiment: its name.
        start: key of the model that it starts from.
        model: folder or hub name of that.
        file: a file of records, or "".
    """
    found = [f"+experiment={experiment}", "model=pretrained", word("model.name", model_name(model))]
    name = _folder_name(_ENDINGS.sub("", Path(file).name))
    named = ["dataset=files", word("dataset.path", file), word("dataset.name", name)]
    return [*found, word(start, model), *(named if file else ())]


def scorer_words(functions: Sequence[str]) -> list[str]:
    """Return the words of the scorer of functions, `FILE.py:NAME` or `FILE.py:NAME=WEIGHT`.

    Raises:
        ConfigError: if one is neither, or if two have one name.
    """
    scorers: dict[str, Any] = {}
    weights = {}
    for text in functions:
        found = _REWARD.fullmatch(text)
        name = found["name"].rpartition(".")[2] if found else ""
        if found is None or name in scorers:
            told = "another is called so" if found else "write FILE.py:NAME or FILE.py:NAME=0.2"
            raise ConfigError(f"--reward {text}: {told}")
        if found["weight"]:
            weights[name] = float(found["weight"])
        function = text.partition("=")[0]
        scorers[name] = {"_target_": "rlhf_lightning.FunctionScorer", "function": function}
    if len(functions) == 1 and not weights:
        return ["scorer=function", word("scorer.function", functions[0])]
    summed = [given("scorer.scorers", scorers), given("scorer.weights", weights)]
    return ["scorer=weighted", *summed]


def read_experiment(name: str) -> Experiment:
    """Return what an experiment's short command line stands for.

    Raises:
        ConfigError: if there is no such experiment.
    """
    known = choices("experiment")
    if name not in known:
        told = f"{name!r} is no experiment{did_you_mean(name, known)}"
        raise ConfigError(f"{told} (rlhf-train EXPERIMENT MODEL FILE, one of {', '.join(known)})")
    cfg = composition("train", [*config_dirs(), f"+experiment={name}"])
    node: Any = OmegaConf.to_container(cfg, resolve=False)
    module, records = node["module"], node["data"].get("kind", "prompts")
    start = re.fullmatch(r"\$\{(\S+)\}", str(module.get("source", module.get("policy"))))
    needs_reward = "${artifacts.reward}" in str(scorer := node.get("scorer"))
    named = re.findall(r"\$\{artifacts\.(\w+)\}", str(module))
    key = start[1] if start else ""
    further = {f"artifacts.{kind}" for kind in named if node["artifacts"][kind]}
    others = sorted(further - {key, "artifacts.reward"}) if start else []
    return Experiment(name, key, records, module, scorer, needs_reward, others)


def replaced(words: Sequence[str], by: Sequence[str]) -> list[str]:
    """Return words without those that others set, nor the name of a group they choose, and those.

    A plain word of a group or value would be read twice, and a name would rename another model.
    """
    keys = keys_of(by)
    keys |= {f"{key}.name" for key in keys}
    return [*(one for one in words if not keys_of([one]) & keys), *by]


def spelled_out(words: Sequence[str], command: str = "train") -> list[str]:
    """Return the overrides that a command line stands for; other words as they are.

    Args:
        words: `EXPERIMENT MODEL FILE` of a training, `--reward` and `--reward-model` of any.
        command: its name.

    Raises:
        ConfigError: for a wrong experiment, model, file or reward, with what to write.
    """
    functions, others = values_of("--reward", words)
    models, others = values_of("--reward-model", others)
    if len(models) + bool(functions) > 1:
        raise ConfigError(f"give one reward: {_REWARDS}")
    plain, flags = list[str](), list[str]()
    for before, one in zip(("", *others), others, strict=False):
        is_plain = not one.startswith("-") and before not in _HYDRA_TAKES_A_WORD
        (plain if is_plain else flags).append(one)
    _check_flags(flags, command)
    bare = [one for one in plain if re.match(r"[/.]|[^+~=][^=]*$", one)]
    named = next((one.partition("=")[2] for one in plain if one.startswith("+experiment=")), None)
    if command in TRAINING and bare and named is None:
        rest = [each for each in plain if each not in bare]
        rewards = (each for one in functions for each in ("--reward", one))
        own = [each for each in rest if not each.startswith("hydra.")]
        TYPED[:] = [*bare, *own, *(word("artifacts.reward", one) for one in models), *rewards]
        plain = _of_experiment(bare, rest, functions, models)
    elif functions or models:
        experiment = read_experiment(named) if named else None
        plain = replaced(plain, _reward_words(command, experiment, functions, models))
    return [*plain, *flags]  # argparse wants those without a flag together


def _of_experiment(
    bare: list[str], others: list[str], functions: list[str], models: list[str]
) -> list[str]:
    """Return the overrides of EXPERIMENT MODEL FILE."""
    one = read_experiment(bare[0])
    if not one.start:
        raise ConfigError(f"{one.name} starts from no model: write +experiment={one.name}")
    model, file = _model_and_file(one, bare[1:], others)
    ours = short_words(one.name, one.start, model, file)
    lengths = [each for each in others if _SAYS_LENGTHS.match(each)]
    ours += fitting_lengths(replaced(ours, lengths), model)
    has_own = any(each.lstrip("+").startswith(("scorer", "artifacts.reward=")) for each in others)
    if one.needs_reward and not (has_own or functions or models):
        raise ConfigError(f"{one.name} needs a reward: {_REWARDS}")
    reward = _reward_words("train", one, functions, models) if functions or models else []
    told = replaced([*ours, *reward], others)
    if lengths and (fits := fitting_lengths(told, model)):
        keys = {each.partition("=")[0] for each in fits}
        given = " ".join(each for each in lengths if each.lstrip("+").partition("=")[0] in keys)
        error = f"{given or 'these lengths'}: the context of {model} has no room for so many tokens"
        raise ConfigError(f"{error}: use {' '.join(fits)}")
    return told


def _check_flags(words: Sequence[str], command: str) -> None:
    """Refuse unknown flags; `--KEY=VALUE` is refused where the words are read."""
    for flag, equals, _ in (one.partition("=") for one in words if one.startswith("--")):
        near = did_you_mean(flag, _WITH_VALUE if equals else _FLAGS)
        if flag not in _FLAGS and (near or not equals):
            raise ConfigError(f"unknown flag {flag}{near or f': see rlhf-{command} --help'}")


def _model_and_file(one: Experiment, words: list[str], others: Sequence[str]) -> tuple[str, str]:
    """Return a model that can be loaded, and a file that exists; "" where `dataset=` is given."""
    has_own = any(each.startswith("dataset=") for each in others)
    if len(words) != 2 - has_own:
        got = " ".join(words) or f"nothing (+experiment={one.name} is of the built-in world)"
        wanted = f"a model{'' if has_own else f' and a file of records ({one.records})'}"
        usage = f"write rlhf-train {one.name} MODEL{'' if has_own else ' FILE'}"
        raise ConfigError(f"{one.name} takes {wanted}, got {got}: {usage}")
    model, file = _available(words[0]), "".join(words[1:])
    if not Path(file).exists():
        hub = "or dataset=hub dataset.hub_name=NAME dataset.name=NAME"
        told = f"{file} does not exist: give a file of records ({one.records}), {hub}"
        raise ConfigError(f"{told}{near_path(file, Path.exists)}")
    return model, file


def _available(source: str) -> str:
    """Return the folder or hub name of a model; of a run, the folder that it has exported."""
    exported = RunFolder(Path(source)).export
    found = str(exported) if exported.is_dir() else source
    if not is_available(found):
        raise ConfigError(no_model(source, "give a model folder, or OWNER/NAME on the hub"))
    if is_adapter(found):
        raise ConfigError(of_adapter(Path(found)))
    return found


def model_name(source: str) -> str:
    """Return what a model is called: as its training called it, or by the end of its path."""
    named = None
    with suppress(OSError, ValueError):
        named = at(read_yaml(Path(source, "training_config.yaml")), "model.name")
    return _folder_name(named or Path(source).absolute().name)


def fitting_lengths(words: Sequence[str], model: str) -> list[str]:
    """Return words for the lengths that a model's context has no room for.

    Rows get the whole of it, prompts and responses half each: what `rlhf-train` else asks for.

    Args:
        words: what says the lengths.
        model: a folder, whose `config.json` has the context; of a hub name it is not known here.
    """
    if (context := _context(model)) is None:
        return []
    with suppress(ConfigError):  # it is told where the words are read
        cfg = composition("train", [*config_dirs(), *words])

        def length(key: str) -> int:
            value = OmegaConf.select(cfg, key, throw_on_resolution_failure=False)
            return value if isinstance(value, int) else 0

        half = max(context // 2, 1)
        room = dict.fromkeys(_HALVES, half) if sum(map(length, _HALVES)) > context else {}
        if not length(_SAMPLED):
            room = {_WHOLE: context, _ANSWERED: half}
        return [word(key, most) for key, most in room.items() if length(key) > most]
    return []


def _context(model: str) -> int | None:
    """Return how many tokens a model in a folder reads; None where that is not known here."""
    config = None
    with suppress(OSError, ValueError):
        config = read_json(Path(model, "config.json"))
    names = ("text_config.max_position_embeddings", "max_position_embeddings", "n_positions")
    return next((size for name in names if isinstance(size := at(config, name), int)), None)


def _folder_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.+-]+|\.{2,}", "_", text).lstrip("+.-")[:60] or "mine"


def _reward_words(
    command: str, one: Experiment | None, functions: list[str], models: list[str]
) -> list[str]:
    """Return the words of `--reward` or `--reward-model`, of an experiment or another command."""
    if one is not None and one.scorer is None:
        raise ConfigError(f"{one.name} learns from records alone: leave --reward out")
    if command == "collect" and functions:
        raise ConfigError("rlhf-collect has scores of a reward model: write --reward-model FOLDER")
    if functions:
        return scorer_words(functions) if one is None else one.reward_words(functions)
    chosen = ["scorer=reward_model"] if command == "evaluate" else []
    key = "reward" if command == "chat" else "artifacts.reward"
    return [*chosen, word(key, _available(models[0]))]


def with_file(words: Sequence[str]) -> list[str]:
    """Return the words of a command line, with those of the files of `--config` before them.

    Raises:
        ConfigError: if a file cannot be read.
    """
    files, others = values_of("--config", words)
    for file in files:
        if not Path(file).exists():
            raise ConfigError(
                f"--config {file} does not exist: check it{near_path(file, Path.is_file)}"
            )
        try:
            content: Any = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
            others = replaced(list(_words(content)), others)
        except (*COMPOSE_ERRORS, OSError, AttributeError, yaml.YAMLError) as error:
            told = f"--config {file}: {' '.join(str(error).split())}"
            raise ConfigError(f"{told}; write KEY: VALUE, such as experiment: dpo") from error
    return others


def _words(node: Mapping[Any, Any], where: str = "") -> Iterator[str]:
    for name, value in node.items():
        key = f"{where}{name}"
        nested = isinstance(value, Mapping) and all(re.fullmatch(r"[\w.]+", f"{k}") for k in value)
        if nested and value:
            yield from _words(value, f"{key}.")
        elif key == FOLDERS:
            yield from (f"{CONFIG_DIR}{Path(folder)}" for folder in value)
        elif key.startswith("~"):
            yield key
        else:  # groups and other keys of the top are there, keys below may be new ones
            yield word(f"{'+' * (key in ADDED)}{'++' * ('.' in key)}{key}", value)


def as_overrides(words: Sequence[str]) -> list[str]:
    """Return the command line of a pipeline with its words for one stage as Hydra reads them.

    `ppo:module.ppo.kl_coef=0.1` becomes `overrides.ppo=['module.ppo.kl_coef=0.1']`; `train:` is for
    every training stage, `round_2/ppo:` for one round alone.

    Raises:
        ConfigError: for another stage, with the nearest.
    """
    own: dict[str, list[str]] = {}
    others = []
    for one in words:
        place, colon, rest = f"{'train:' * one.startswith(OF_TRAINING)}{one}".partition(":")
        at, _, stage = place.rpartition("/")
        if colon and stage in ADDRESSED and (not at or re.fullmatch(r"round_[1-9]\d*", at)):
            key = f"+overrides.{at}.{stage}" if at else f"overrides.{stage}"
            own.setdefault(key, []).append(quoted(rest))
        elif colon and re.fullmatch(r"[\w/]+", place):
            known = f"{', '.join(ADDRESSED)}, or with round_2/ before it"
            raise ConfigError(f"{one}: {place} is none of {known}{did_you_mean(stage, ADDRESSED)}")
        else:
            others.append(one)
    return others + [f"{key}=[{','.join(found)}]" for key, found in own.items()]
