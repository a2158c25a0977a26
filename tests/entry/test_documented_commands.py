"""Every command of the README and of the docs is one that works.

All are composed and their hyper-parameters built; those that need no data of the user's run with
`debug=fast`.
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
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from rlhf_lightning.composition import check_config, check_hparams, conf_dir, register

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```[^\n]*\n(.*?)^```", re.M | re.S)
ASSIGNMENT = re.compile(r'^([A-Z]+)="([^"]*)"', re.M)
OVERRIDE = re.compile(r"[+~]{0,2}[\w./@]+=.*|~[\w./@]+")
BUILT_IN = ("sft", "reward", "ppo")


@dataclass(frozen=True)
class Command:
    """A command of a page: `module` of the package and what follows it."""

    page: str
    module: str
    arguments: tuple[str, ...]

    @property
    def overrides(self) -> list[str]:
        return [a for a in self.arguments if OVERRIDE.fullmatch(a)]

    @property
    def is_sweep(self) -> bool:
        return "-m" in self.arguments

    def __str__(self) -> str:
        return f"{self.page}: {self.module} {' '.join(self.arguments)}"


def lines_of(page: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the lines of the code blocks, continued ones joined, and the variables so far."""
    variables: dict[str, str] = {}
    for block in FENCE.findall(page.read_text(encoding="utf-8")):
        variables |= dict(ASSIGNMENT.findall(block))
        for line in re.sub(r"\\\n\s*", "", block).splitlines():
            yield line.strip(), dict(variables)


def arguments_of(text: str, variables: dict[str, str]) -> tuple[str, ...]:
    """Return overrides and options up to the first word that is neither: the comment."""
    for name, value in variables.items():
        text = text.replace(f"${name}", value)
    text = re.sub(r"<(\w+)>", r"\1", text)  # a placeholder
    kept: list[str] = []
    for word in shlex.split(text):
        follows_option = bool(kept) and kept[-1] in ("--cfg", "--to", "--push-to-hub")
        if not (OVERRIDE.fullmatch(word) or word.startswith("-") or follows_option):
            break
        kept.append(word)
    return tuple(kept)


def commands() -> list[Command]:
    found: dict[tuple[str, tuple[str, ...]], Command] = {}
    for page in PAGES:
        for line, variables in lines_of(page):
            match = re.search(r"-m rlhf_lightning\.(\w+)(.*)|^rlhf-(\w+)(.*)", line)
            if match is None:
                continue
            module = match.group(1) or match.group(3)
            rest = (match.group(2) if match.group(1) else match.group(4)).strip()
            rest = re.sub(r"^\.\.\. ", "", rest)
            command = Command(page.name, module, arguments_of(rest, variables))
            found.setdefault((module, command.arguments), command)
    return list(found.values())


COMMANDS = commands()
TRAINING = [
    c
    for c in COMMANDS
    if c.module in ("train", "plan") and any(o.startswith("+experiment=") for o in c.overrides)
]
OFFLINE = [
    c
    for c in TRAINING
    if c.module == "train"
    and {f"+experiment={name}" for name in BUILT_IN} & set(c.overrides)
    and not any(o.startswith(("world", "artifacts", "data.path", "logger")) for o in c.overrides)
]


def first_of_each(overrides: list[str]) -> list[str]:
    """Return the first job of a sweep."""
    return [o if "[" in o else o.split(",")[0] for o in overrides]


def test_the_pages_hold_many_commands_of_every_kind():
    assert len(TRAINING) >= 30
    assert len(OFFLINE) >= 5
    assert {"train", "plan", "report", "export", "collect"} <= {c.module for c in COMMANDS}


@pytest.mark.parametrize("command", TRAINING, ids=str)
def test_a_documented_training_command_composes_and_its_hyper_parameters_are_built(command):
    register()
    overrides = [o for o in command.overrides if not o.startswith("plan.")]
    overrides = first_of_each(overrides) if command.is_sweep else overrides
    with initialize_config_dir(version_base="1.3", config_dir=str(conf_dir())):
        cfg = compose("train", overrides=overrides)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # presets of the articles lie outside the usual ranges
        check_config(cfg)
        check_hparams(cfg)


@pytest.mark.parametrize(
    "command", [c for c in COMMANDS if c.module not in ("train", "plan")], ids=str
)
def test_another_documented_command_exists_and_has_the_options_it_is_given(command):
    module = ROOT / "rlhf_lightning" / f"{command.module}.py"
    source = module.read_text(encoding="utf-8")
    for argument in command.arguments:
        if argument.startswith("--"):
            assert argument in source, f"{module.name} knows no {argument}"
    file = conf_dir() / f"{command.module}.yaml"
    if file.is_file():
        register()
        with initialize_config_dir(version_base="1.3", config_dir=str(conf_dir())):
            compose(command.module, overrides=command.overrides)


def test_every_documented_console_script_and_make_target_exists():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    targets = set(re.findall(r"^([a-z-]+):.*?##", (ROOT / "Makefile").read_text(), re.M))
    targets |= {"ppo", "sft", "reward"}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        # `rlhf-lightning` is the package's own name.
        named = set(re.findall(r"(?<![\w/-])(rlhf-[a-z]+)", text)) - {"rlhf-lightning"}
        assert named <= set(scripts), f"{page.name} names {sorted(named - set(scripts))}"
        made = set(re.findall(r"(?:`|^)make ([a-z-]+)", text, re.M))
        assert made <= targets, f"{page.name} names {sorted(made - targets)}"


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_every_offline_command_runs_with_debug_fast(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "WANDB_MODE": "offline"}
    for command in OFFLINE:
        words = [w for w in command.arguments if w not in ("--cfg", "job")]
        if len(words) != len(command.arguments):
            words += ["--cfg", "job"]
        result = subprocess.run(
            [sys.executable, "-m", "rlhf_lightning.train", *words, "debug=fast", "logger=none"],
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
