"""The folder of configurations, and their registration with Hydra."""

from __future__ import annotations

import json
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from functools import cache, partial
from itertools import takewhile
from pathlib import Path
from typing import Any, cast

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlhf_lightning import hparams
from rlhf_lightning.distributed.launch import launch_time
from rlhf_lightning.doctor.interventions import ActionSettings
from rlhf_lightning.doctor.thresholds import DoctorThresholds

TRAINING = ("train", "plan")  # commands that take EXPERIMENT MODEL FILE
SHORT = (*TRAINING, "evaluate", "collect", "chat")  # and those with --reward, --reward-model
COMPOSE_ERRORS = (HydraException, OmegaConfBaseException, ValueError, TypeError)
LENGTHS = ("data.num_iterations", "data.num_epochs")  # of a training: one of them
CONFIG_DIR = "--config-dir="  # of Hydra: a folder of the user's, with the groups of conf/
WORDS: dict[str, Any] = OmegaConf.to_container(  # type: ignore[assignment]
    OmegaConf.load(Path(__file__).with_name("words.yaml"))
)
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")
# A text that Hydra reads as it is.
_PLAIN = re.compile(
    r"(?!(?:null|true|false|nan|inf)\Z)[a-z_./][\w./:@+-]*", re.ASCII | re.IGNORECASE
)


class ConfigError(ValueError):
    """The configuration asks for something that does not exist or is not allowed."""


def conf_dir() -> Path:
    """Return the folder of configurations: inside the package in a wheel, else beside it."""
    here = Path(__file__).resolve().parents[2]
    for folder in (here / "conf", here.parent / "conf"):
        if (folder / "train.yaml").is_file():
            return folder
    raise FileNotFoundError(f"no conf/train.yaml in {here} or beside it: the package is incomplete")


# The config group `hparams`: `ppo` is `PPOHparams`.
HPARAMS: dict[str, Any] = {
    "doctor": DoctorThresholds,
    "doctor_actions": ActionSettings,
    **{
        name.removesuffix("Hparams").lower(): cls
        for name, cls in vars(hparams).items()
        if name.endswith("Hparams") and cls is not hparams.OnPolicyHparams
    },
}


@cache
def register() -> None:
    """Make hyper-parameter defaults and `sweeps/` known to Hydra; call before composing.

    Defaults live once, in `hparams.py`: this turns them into the config group `hparams`.
    """
    sweeps = f"file://{conf_dir().parent}"
    OmegaConf.register_new_resolver("rlhf_sweeps", lambda: sweeps, replace=True)
    OmegaConf.register_new_resolver("rlhf_now", launch_time, replace=True)
    OmegaConf.register_new_resolver("rlhf_name", _folder_name, replace=True)
    OmegaConf.register_new_resolver("rlhf_choices", choices_text, replace=True)
    store = ConfigStore.instance()
    for name, cls in HPARAMS.items():
        defaults = {f.name: f.default for f in fields(cls) if f.default is not MISSING}
        target = f"rlhf_lightning.{cls.__name__}"
        store.store(group="hparams", name=name, node={"_target_": target, **defaults})


def check_path_name(value: object) -> str:
    """Return a text that is to name one folder, unless it would name another one.

    Raises:
        ValueError: if it has separators, begins with a dot, or holds what a shell would change.
    """
    text = str(value)
    if not _NAME.fullmatch(text) or ".." in text or len(text) > 100:
        told = f"={text!r} becomes the name of a folder: use letters, digits and _ . + -"
        raise ValueError(f"{told} (no / and no .., at most 100)")
    return text


def _folder_name(value: object) -> str:
    try:
        return check_path_name(value)
    except ValueError as error:
        raise ValueError(f"name{error}") from error


def with_one_length(words: Sequence[str]) -> list[str]:
    """Return the words of a training; the length among them takes the place of the default one."""
    keys = [word.lstrip("+~").partition("=")[0] for word in words]
    given = [key for key in LENGTHS if key in keys]
    if len(given) != 1:
        return list(words)
    (other,) = set(LENGTHS) - set(given)
    # Of a sweep the first; its other choices have the same keys.
    groups = [
        word.partition(",")[0] for word, key in zip(words, keys, strict=True) if "." not in key
    ]
    groups = [word for word in groups if not word.startswith("-") or word.startswith(CONFIG_DIR)]
    try:
        is_set = (
            at(OmegaConf.to_container(composed("train", groups), resolve=False), other) is not None
        )
    except COMPOSE_ERRORS:  # reading all words says what is wrong
        return list(words)
    return [*words, f"{other}=null"] if is_set else list(words)


def composed(entry: str, overrides: list[str]) -> DictConfig:
    """Return the composed configuration of a command line, with the node `hydra`.

    Args:
        entry: the command, and its file in `conf/`.
        overrides: overrides of the command line, `--config-dir=FOLDER` among them.

    Raises:
        hydra.errors.HydraException, omegaconf.errors.OmegaConfBaseException: if it does not
        compose.
    """
    overrides = with_one_length(overrides) if entry == "train" else overrides
    words = [word for word in overrides if not word.startswith(CONFIG_DIR)]
    if GlobalHydra.instance().is_initialized():  # by the command line, in the same folders
        return compose(entry, overrides=words, return_hydra_config=True)
    folders = [word.removeprefix(CONFIG_DIR) for word in overrides if word.startswith(CONFIG_DIR)]
    if folders:
        found = OmegaConf.create(primary(entry)).hydra.get("searchpath", [])
        found = [*found, *(f"file://{Path(folder).absolute()}" for folder in folders)]
        words.append(f"hydra.searchpath=[{', '.join(map(quoted, found))}]")
    with initialize_config_dir(version_base="1.3", config_dir=str(conf_dir())):
        return compose(entry, overrides=words, return_hydra_config=True)


def config_dirs() -> list[str]:
    """Return the words of the command line that name folders of the user's, for other commands.

    There they are first or last: between others, argparse would take what follows for unknown.
    """
    given = [w.removeprefix(CONFIG_DIR) for w in sys.argv[1:] if w.startswith(CONFIG_DIR)]
    return [f"{CONFIG_DIR}{Path(folder).absolute()}" for folder in given]


def keys_of(words: Iterable[str]) -> set[str]:
    """Return the keys that words of a command line set, add or remove."""
    return {word.lstrip("+~").partition("=")[0] for word in words}


def values_of(flag: str, words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the values of a flag, `FLAG VALUE` or `FLAG=VALUE`, and the other words.

    Raises:
        ConfigError: if one has no value.
    """
    values, others, left = [], [], iter(words)
    for one in left:
        name, equals, value = one.partition("=")
        if name != flag:
            others.append(one)
        elif value := value if equals else next(left, ""):
            values.append(value)
        else:
            raise ConfigError(f"{flag} needs a value behind it")
    return values, others


def group_files(group: str) -> dict[str, Path]:
    """Return the files of a config group by name, those of the user's folders included."""
    folders = [conf_dir(), *(Path(word.removeprefix(CONFIG_DIR)) for word in config_dirs())]
    files = (path for folder in folders for path in (folder / group).glob("*.yaml"))
    return {path.stem: path for path in sorted(files, key=lambda path: path.stem)}


def choices(group: str) -> list[str]:
    """Return the names of a config group, those of the user's folders included."""
    return list(group_files(group))


def described(file: Path) -> str:
    """Return the comment at the top of a YAML file, without its package line."""
    lines = takewhile(lambda line: line.startswith("#"), file.read_text("utf-8").splitlines())
    return " ".join(line.lstrip("# ").strip() for line in lines if "@package" not in line)


def help_text(entry: str) -> str:
    """Return the help of a command, from its file in `conf/`."""
    register()
    return str(OmegaConf.load(conf_dir() / f"{entry}.yaml").hydra.help.template)


def choices_text() -> str:
    """Return experiments and groups, a paragraph each, as wide as the terminal, at most 100."""
    rows = [("experiment", " ".join(choices("experiment"))), ("", "Groups, written GROUP=NAME:")]
    for group, about in WORDS["groups"].items():
        note = f" ({about})" if about else ""
        rows.append((group, f"{' '.join(choices(group))}{note}"))
    width = min(shutil.get_terminal_size().columns, 100) - 1
    fill = partial(textwrap.fill, width=width, subsequent_indent=" " * 18, break_on_hyphens=False)
    filled = (fill(t, initial_indent=f"  {name:<16}") if name else f"\n{t}\n" for name, t in rows)
    return "\n".join(filled)


@cache
def primary(entry: str = "train") -> dict[Any, Any]:
    """Return the primary configuration of a command, as written."""
    return cast(Any, OmegaConf.to_container(OmegaConf.load(conf_dir() / f"{entry}.yaml")))


@cache
def written_keys(group: str) -> frozenset[str]:
    """Return the keys of all files of a config group, and of the group in `train.yaml`, dotted."""
    files = map(OmegaConf.load, (conf_dir() / group).rglob("*.yaml"))
    nodes = [primary().get(group), *(OmegaConf.to_container(file) for file in files)]
    return frozenset({group}.union(*(dotted_keys(node, f"{group}.") for node in nodes)))


def dotted_keys(node: Any, where: str = "") -> Iterator[str]:
    """Yield the dotted keys of nested mappings, or of a configuration as it is written."""
    node = OmegaConf.to_container(node) if isinstance(node, DictConfig) else node
    for key, value in node.items() if isinstance(node, Mapping) else ():
        yield f"{where}{key}"
        yield from dotted_keys(value, f"{where}{key}.")


def describe_interpolation(error: OmegaConfBaseException) -> str:
    """Return in one line which key is not set, or which one cannot be resolved."""
    text = str(error).strip().splitlines()[0]
    missing = re.search(r"Missing mandatory value: ([\w.]+)", text)
    if missing:
        return f"{missing.group(1)} is not set: add {missing.group(1)}=..."
    if "not in struct" in text or "Missing key" in text:
        return f"{error.full_key} is missing: set it, or choose its group as a whole (GROUP=NAME)"
    nowhere = re.search(r"Interpolation key '([^']+)' not found", text)
    if nowhere and error.full_key:
        return f"{error.full_key} refers to {nowhere.group(1)}, which is missing: set it"
    return f"{error.full_key}: {text}" if error.full_key else text


def hydra_folder(hydra: DictConfig, kind: str) -> Path:
    """Return Hydra's folder of a `run` or a `sweep`.

    Raises:
        ConfigError: if its name refers to what is not there.
    """
    try:
        return Path(str(hydra[kind].dir))
    except OmegaConfBaseException as error:
        raise ConfigError(describe_interpolation(error)) from error


def at(node: Any, key: str) -> Any:
    """Return the value at a dotted key of nested mappings; None where nothing stands."""
    for part in key.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    return node


def texts(node: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield the texts in nested mappings and lists with their dotted keys."""
    if isinstance(node, Mapping | list):
        for name, value in node.items() if isinstance(node, Mapping) else enumerate(node):
            yield from texts(value, f"{key}.{name}" if key else str(name))
    elif isinstance(node, str):
        yield key, node


def quoted(text: str) -> str:
    """Return a text as Hydra reads it on a command line, whatever characters are in it."""
    # Hydra reads a backslash as itself, but before a quote as what escapes it.
    escaped = re.sub(r"(\\*)'", r"\1\1\\'", text)
    escaped = re.sub(r"(\\+)$", r"\1\1", escaped)
    return f"'{escaped}'"


def given(key: str, value: object) -> str:
    """Return `key=value` as Hydra reads it: a path, or a value of JSON."""
    return f"{key}={_written(value)}"


def word(key: str, value: object) -> str:
    """Return `key=value` as `given`, with quotes only where Hydra needs them."""
    text = str(value)
    is_plain = isinstance(value, str | Path) and _PLAIN.fullmatch(text)
    return f"{key}={text}" if is_plain else given(key, value)


def _written(value: object) -> str:
    if isinstance(value, Mapping):
        return f"{{{', '.join(given(k, one).replace('=', ': ', 1) for k, one in value.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(map(_written, value))}]"
    return quoted(str(value)) if isinstance(value, str | Path) else json.dumps(value)
