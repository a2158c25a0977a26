"""Every command of the README and of the docs is one that works.

All can be pasted: what stands behind them is a comment. All are composed, their hyper-parameters
built; those that need no data of the user's run with `debug=fast`.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from rlhf_lightning.app.config.compose import (
    CONFIG_DIR,
    choices,
    composed,
    register,
    values_of,
    word,
)
from rlhf_lightning.app.config.settings import TrainSettings
from rlhf_lightning.app.config.validate import load_settings
from rlhf_lightning.app.config.ways import (
    as_overrides,
    read_experiment,
    replaced,
    short_words,
    spelled_out,
)
from rlhf_lightning.app.start import with_run

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```[^\n]*\n(.*?)^```", re.M | re.S)
ASSIGNMENT = re.compile(r"^([A-Z]+)=\(([^)]*)\)", re.M)
OVERRIDE = re.compile(r"[+~]{0,2}[\w./@:]+=.*|~[\w./@]+")
OURS = re.compile(r"-m rlhf_lightning\.(\w+)(.*)|^rlhf-(\w+)(.*)")
TAKES_A_WORD = ("--config-dir", "--cfg", "--config", "--recipe", "--reward", "--reward-model")
TAKES_FOLDERS = ("report", "export", "chat", "preview")
BUILT_IN = ("sft", "reward", "ppo")


@dataclass(frozen=True)
class Command:
    """A command of a page: `module` of the package and the words that follow it."""

    page: str
    module: str
    words: tuple[str, ...]

    @property
    def arguments(self) -> tuple[str, ...]:
        return written_out(self.module, self.words)

    @property
    def overrides(self) -> list[str]:
        return [a for a in self.arguments if OVERRIDE.fullmatch(a) or a.startswith(CONFIG_DIR)]

    @property
    def is_sweep(self) -> bool:
        return "-m" in self.words

    def __str__(self) -> str:
        return f"{self.page}: {self.module} {' '.join(self.words)}"


def lines_of(page: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the lines of the code blocks, continued ones joined, and the variables so far."""
    variables: dict[str, str] = {}
    for block in FENCE.findall(page.read_text(encoding="utf-8")):
        variables |= dict(ASSIGNMENT.findall(block))
        for line in re.sub(r"\\\n\s*", "", block).splitlines():
            yield line.strip(), dict(variables)


def arguments_of(text: str, variables: dict[str, str]) -> tuple[str, ...]:
    """Return the words of a command line that stand before its comment."""
    for name, value in variables.items():
        text = text.replace(f'"${{{name}[@]}}"', value)
    text = re.sub(r"<(\w+)>", r"\1", text)  # a placeholder
    return tuple(word for word in shlex.split(text, comments=True) if word != "...")


def module_of(ours: re.Match[str]) -> str:
    """Return the module of a command: `preview` of `rlhf-data`."""
    target = SCRIPTS.get(f"rlhf-{ours.group(3)}", ours.group(1) or ours.group(3))
    return target.partition(":")[0].rpartition(".")[2]


def stray_words(line: str, variables: dict[str, str]) -> list[str]:
    """Return what a shell would hand to the command of a line although it is not meant for it."""
    ours = OURS.search(line)
    if ours is None:
        return []
    module = module_of(ours)
    words = arguments_of(ours.group(2) if ours.group(1) else ours.group(4), variables)
    words = words[3:] if set(words[:1]) & set(choices("experiment")) else words
    words = words[: words.index(">")] if ">" in words else words
    return [
        word
        for before, word in zip(("", *words), words, strict=False)
        if not (OVERRIDE.fullmatch(word) or word.startswith("-") or before in TAKES_A_WORD)
        and not (
            module in TAKES_FOLDERS and ("/" in word or word.isupper() or word.endswith(".jsonl"))
        )
    ]


def written_out(module: str, words: tuple[str, ...]) -> tuple[str, ...]:
    """Return the overrides of `EXPERIMENT MODEL FILE`, whose files need not exist, or a reward."""
    register()
    if not words or words[0] not in choices("experiment"):
        return tuple(spelled_out(words, module)) if "--reward" in words else words
    one, (model, file, *rest) = read_experiment(words[0]), words[1:]
    functions, rest = values_of("--reward", rest)
    models, rest = values_of("--reward-model", rest)
    ours = short_words(one.name, one.start, model, file)
    ours += one.reward_words(functions) if functions else []
    ours += [word("artifacts.reward", each) for each in models]
    return tuple(replaced(ours, rest))


def commands() -> list[Command]:
    found: dict[tuple[str, tuple[str, ...]], Command] = {}
    for page in PAGES:
        for line, variables in lines_of(page):
            match = OURS.search(line)
            if match is None:
                continue
            module = module_of(match)
            rest = match.group(2) if match.group(1) else match.group(4)
            words = arguments_of(rest, variables)
            found.setdefault((module, words), Command(page.name, module, words))
    return list(found.values())


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("RLHF_ALLOWED_TARGETS", "examples.")


COMMANDS = commands()
TRAINING = [
    c
    for c in COMMANDS
    if c.module in ("train", "plan")
    and (set(c.words[:1]) & set(choices("experiment")) or "+experiment=" in " ".join(c.words))
]
OFFLINE = [
    c
    for c in TRAINING
    if c.module == "train"
    and {f"+experiment={name}" for name in BUILT_IN} & set(c.words)
    and not any(w.startswith(("dataset", "artifacts", "data.path", "logger")) for w in c.words)
    # vLLM has an environment of its own, and tests of its own: tests/rollout/test_generate_vllm.py.
    and not any(w.startswith("rollout=vllm") for w in c.words)
    and "launcher=slurm" not in c.words  # needs a cluster: tests/multiprocess/test_tasks.py
    and "--cfg" not in c.words  # it prints the configuration and trains nothing
]


def first_of_each(overrides: list[str]) -> list[str]:
    """Return the first job of a sweep."""
    return [o if "[" in o else o.split(",")[0] for o in overrides]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_stands_behind_a_documented_command_is_a_comment(page):
    found = {line: stray for line, values in lines_of(page) if (stray := stray_words(line, values))}
    assert not found, f"put `# ` before it, or a shell hands it to the command: {found}"


def settings_of(command: Command) -> TrainSettings:
    overrides = [o for o in command.overrides if not o.startswith("plan.")]
    return compose_stage(tuple(first_of_each(overrides) if command.is_sweep else overrides))


@cache
def compose_stage(overrides: tuple[str, ...]) -> TrainSettings:
    register()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # presets of the articles lie outside the usual ranges
        return load_settings(TrainSettings, "train", list(overrides))


@pytest.mark.thorough
@pytest.mark.parametrize("command", TRAINING, ids=str)
def test_a_documented_training_command_composes_and_its_hyper_parameters_are_built(command):
    settings = settings_of(command)
    assert type(settings.hparams) is settings.spec.kinds[settings.stage]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "command", [c for c in COMMANDS if c.module not in ("train", "plan")], ids=str
)
def test_another_documented_command_composes_with_the_settings_it_is_given(command):
    assert (ROOT / "rlhf_lightning" / f"{command.module}.py").is_file()
    register()
    words = with_run(command.module, command.arguments)
    # A pipeline's words for one stage, such as `ppo:KEY=VALUE`, are no word of Hydra's.
    composed(
        command.module,
        as_overrides(
            [word for word in words if word.startswith(CONFIG_DIR) or not word.startswith("-")]
        ),
    )


def test_every_documented_console_script_and_make_target_exists():
    assert len(TRAINING) >= 30, "the pages are read"
    assert len(OFFLINE) >= 5
    targets = set(re.findall(r"^([a-z-]+):.*?##", (ROOT / "Makefile").read_text(), re.M))
    targets |= {"ppo", "sft", "reward"}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        # `rlhf-lightning` is the package's own name.
        named = set(re.findall(r"(?<![\w/-])(rlhf-[a-z]+)", text)) - {"rlhf-lightning"}
        assert named <= set(SCRIPTS), f"{page.name} names {sorted(named - set(SCRIPTS))}"
        made = set(re.findall(r"(?:`|^)make ([a-z-]+)", text, re.M))
        assert made <= targets, f"{page.name} names {sorted(made - targets)}"


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_every_offline_command_runs_with_debug_fast(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "WANDB_MODE": "offline"}
    for command in OFFLINE:
        words = [*command.arguments, "debug=fast", "logger=none"]
        result = subprocess.run(
            [sys.executable, "-m", "rlhf_lightning.train", *words],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
        assert result.returncode == 0, (
            f"{command}\n{result.stdout[-2000:]}\n{result.stderr[-2000:]}"
        )
    reports = [str(path.parent) for path in tmp_path.glob("outputs/ppo/*/summary.json")]
    assert reports
    subprocess.run(
        [sys.executable, "-m", "rlhf_lightning.report", *reports],
        cwd=tmp_path,
        env=environment,
        check=True,
        timeout=300,
    )
