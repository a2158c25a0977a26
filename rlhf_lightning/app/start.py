"""The start of every command, and what is imported when.

Help, version and completion import nothing. Unknown keys, types, hyper-parameters and names that a
file of the user's does not have are answered with what `app/config` imports, a second. What only
the signatures of our classes say is checked by the command, which imports torch, Lightning and
transformers.
"""

from __future__ import annotations

import gc
import importlib
import os
import re
import shlex
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra.types import RunMode

from rlhf_lightning import __version__
from rlhf_lightning.app.config.compose import (
    CONFIG_DIR,
    SHORT,
    TRAINING,
    ConfigError,
    conf_dir,
    help_text,
    primary,
    quoted,
    register,
    values_of,
    with_one_length,
)
from rlhf_lightning.distributed.launch import global_rank
from rlhf_lightning.distributed.process import prepare_process
from rlhf_lightning.runs.folder import RunFolder

AS_PYTHON = "--as-python"
MISTAKE = 2  # exit status
_HOME = re.compile(r"(?<=[=,\[])~(?=/|$)")
_HYPHENS = re.compile(r"--(?!(?:cfg|package|info)=)[\w.]+=")  # those are Hydra's
_OF_HYDRA = ("train", "evaluate", "collect", "pipeline")  # commands that make a run folder


def start(command: str, module: str | None = None) -> None:
    """Write the help of a command, its version, or what completes its words in a shell, or run it.

    Args:
        command: its name, and its file in `conf/`.
        module: the file of `app` that has its `main`; None for that of its name.
    """
    # In one order with the other stream and with child processes, whatever the locale can show.
    sys.stdout.reconfigure(errors="replace", line_buffering=True)  # type: ignore[union-attr]
    if {"-h", "--help"} & set(sys.argv[1:]):
        print_help(command)
        return
    if "--version" in sys.argv[1:]:
        print(f"rlhf_lightning {__version__}", flush=True)  # noqa: T201
        return
    if {"-sc", "--shell-completion"} & set(sys.argv[1:]):
        register()
        hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name=command)(id)()
        return
    typed = sys.argv[1:]
    if command == "train" and any(word.partition("=")[0] == "--recipe" for word in typed):
        print_recipe(typed)
        return
    prepare_process()
    check_words(command)
    short = command in SHORT and {*sys.argv[1:]} - {*typed}
    if short and not global_rank():  # on the stream that nobody reads as a program or as JSON
        sys.stderr.write(f"rlhf-{command} {shlex.join(sys.argv[1:])}\n")
    if command == "preview":
        # Tokenizers of transformers import it where it is installed, and do without: 3 seconds.
        sys.modules["torch"] = None  # type: ignore[assignment]
        # Else transformers says that torch is missing.
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    # Imports make half a million objects that stay. The collector looks through those that are
    # there after every 700 new ones by default: a seventh of the time to import torch.
    gc.set_threshold(10_000)
    importlib.import_module(f"rlhf_lightning.app.{module or command}").main()


def print_help(command: str) -> None:
    """Print the help of a command, or of the experiment that is named with it."""
    words = [word.removeprefix("+experiment=") for word in sys.argv[1:]]
    experiment = next((word for word in words if word.isidentifier()), None)
    if experiment is None or command not in TRAINING:
        print(help_text(command), flush=True)  # noqa: T201
    else:
        _print(lambda recipes: recipes.experiment_help(command, experiment))


def print_recipe(words: Sequence[str]) -> None:
    """Print the file of settings that `--recipe EXPERIMENT` asks for, or end the process."""

    def text(recipes: Any) -> str:
        names, others = values_of("--recipe", words)
        told: str = recipes.recipe(names[-1], [one for one in others if not one.startswith("-")])
        return told

    _print(text)


def _print(text: Callable[[Any], str]) -> None:
    # here: help of a command needs no settings
    from rlhf_lightning.app.config import recipes

    register()
    try:
        print(text(recipes), end="", flush=True)  # noqa: T201
    except ConfigError as error:
        fail(str(error))


def check_words(command: str) -> None:
    """End the process for a mistake in the command line that is seen without importing torch."""
    # here: help needs no settings
    from rlhf_lightning.app.config import commands, inherit, validate

    def read(cfg: Any, words: Sequence[str]) -> None:
        run = cfg.run if command in ("evaluate", "collect") else None
        validate.check_functions(cfg)
        if run is None:
            settings = validate.plain_settings(commands.COMMANDS[command], cfg)
            validate.check_models(cfg, words)
            validate.check_first_record(settings)
            validate.check_stages(settings)
        else:
            ours = inherit.check_run(command, RunFolder(Path(str(run))), words)
            validate.check_models(cfg, words, ours)

    read_words(command, read, "train" if command == "plan" else command)


def read_words(
    command: str, read: Callable[[Any, Sequence[str]], Any], config: str | None = None
) -> Any:
    """Return what `read` makes of the command line; end the process if it is a mistake.

    Args:
        command: name of the command.
        read: called with the composed configuration and the words; the run itself will warn.
        config: its file in `conf/`; None for that of its name.

    Returns:
        Its result; None for a sweep, which checks each of its jobs, and where flags but
        `--config-dir` are given, which are Hydra's to read.
    """
    # here: help needs no errors
    from rlhf_lightning.app.config import errors

    words = [word for word in words_of(command) if word != AS_PYTHON]
    has_flags = any(word.startswith("-") and not word.startswith(CONFIG_DIR) for word in words)
    if has_flags and command in _OF_HYDRA:
        return None
    try:
        cfg = errors.composition(config or command, words)
        if cfg.hydra.mode == RunMode.MULTIRUN:
            return None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return read(cfg, words)
    except ConfigError as error:
        fail(str(error))


def fail(message: str, status: int = MISTAKE) -> NoReturn:
    """Write `message` as an error, and end the process."""
    sys.stderr.write(f"error: {message}\n")
    raise SystemExit(status)


def words_of(command: str) -> list[str]:
    """Return the words of the command line as the command's configuration takes them.

    `--config FILE` and the short `EXPERIMENT MODEL FILE` become the overrides they stand for. A
    command that makes no run folder reads a bare path as `run=`. A `~` at the beginning of a path
    is the home folder, which a shell does not see behind `=`.
    """
    # here: help needs no errors
    from rlhf_lightning.app.config import errors, ways

    home, flag = str(Path.home()), CONFIG_DIR.rstrip("=")
    words = [_HOME.sub(lambda _: home, word) for word in sys.argv[1:]]
    register()
    try:
        folders, words = values_of(flag, [flag if word == "-cd" else word for word in words])
        # Written in one word, it goes along to ranks and jobs.
        sys.argv[1:] = words = [*words, *(f"{CONFIG_DIR}{folder}" for folder in folders)]
        words = ways.as_overrides(words) if command == "pipeline" else words
        words = ways.with_file(words)
        words = ways.spelled_out(words, command) if command in SHORT else words
        words = with_one_length(words) if command in TRAINING else words
    except ConfigError as error:
        fail(str(error))
    if gone := errors.withdrawn(words):
        fail(gone)
    if wrong := next(filter(_HYPHENS.match, words), None):
        fail(f"{wrong}: write KEY=VALUE without hyphens (${{args_no_hyphens}} in a W&B sweep)")
    sys.argv[1:] = words
    if command in _OF_HYDRA:
        return words
    return with_run(command, [f"++{w}" if w.startswith(f"{command}.") else w for w in words])


def with_run(entry: str, arguments: Sequence[str]) -> list[str]:
    """Return the arguments with bare paths as `run=`, or `path=`, if the command takes it.

    `--model NAME` and `model=NAME`, which Hydra takes for the choice of a group, name a source.
    """
    if entry == "preview":
        models, rest = values_of("--model", arguments)
        models += [word[6:] for word in rest if word.startswith("model=")]
        arguments = [word for word in rest if not word.startswith("model=")]
        arguments += [f"model.source={quoted(name)}" for name in models]
    paths = [quoted(one) for one in arguments if _is_path(one)]
    key = next((key for key in ("run", "path") if key in primary(entry)), None)
    if not paths or key is None:
        return list(arguments)
    value = paths[0] if len(paths) == 1 else f"[{','.join(paths)}]"
    return [f"{key}={value}", *(one for one in arguments if not _is_path(one))]


def _is_path(argument: str) -> bool:
    key, equals, _ = argument.partition("=")
    return not argument.startswith(("-", "+", "~")) and ("/" in key or not equals)
