"""Help, version and settings of every command."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest
import yaml

import rlhf_lightning
from rlhf_lightning.app.config.commands import COMMANDS
from rlhf_lightning.app.config.compose import composed, conf_dir, help_text, register
from rlhf_lightning.app.config.settings import RunSettings
from rlhf_lightning.app.start import with_run

COMMANDS_ALONE = sorted(n for n, one in COMMANDS.items() if not issubclass(one, RunSettings))
# One process for all: none of them has loaded what is heavy, or the last line would name it.
ASK_EACH = """
import importlib, sys
for command in sys.argv[1:]:
    sys.argv = ["x", "--help"]
    try:
        importlib.import_module(f"rlhf_lightning.{command}").main()
    except SystemExit as left:
        assert left.code == 0
    print("\\f", end="")
heavy = {"torch", "lightning", "transformers", "datasets", "wandb", "numpy", "starlette"}
print(sorted(heavy & set(sys.modules)), end="")
"""


@pytest.mark.thorough
def test_help_begins_with_a_sentence_and_names_the_command_and_loads_no_torch():
    asked = [sys.executable, "-c", ASK_EACH, *sorted(COMMANDS)]
    done = subprocess.run(asked, capture_output=True, text=True, check=True)
    *told, loaded = done.stdout.split("\f")
    for command, text in zip(sorted(COMMANDS), told, strict=True):
        assert text[0].isupper()
        assert f"rlhf_lightning.{command}" in text
    assert loaded == "[]"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_80_columns(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert [line for line in help_text(command).splitlines() if len(line) > 80] == []


@pytest.mark.parametrize("command", [name for name in COMMANDS_ALONE if name != "plan"])
def test_the_file_of_a_command_and_its_settings_have_the_same_keys(command):
    written = yaml.safe_load((conf_dir() / f"{command}.yaml").read_text())
    groups = {next(iter(item)) for item in written.pop("defaults", []) if isinstance(item, dict)}
    assert (set(written) | groups) - {"hydra"} == set(COMMANDS[command].model_fields)


def test_the_version_is_our_own(monkeypatch, capsys):
    for command in sorted(COMMANDS):
        monkeypatch.setattr(sys, "argv", [f"rlhf-{command}", "--version"])
        import_module(f"rlhf_lightning.{command}").main()
        assert capsys.readouterr().out == f"rlhf_lightning {rlhf_lightning.__version__}\n"


def test_bare_paths_are_the_run_whatever_stands_in_their_names():
    register()
    given = ["a b/it's", "outputs/x=1,2/[y]", "output=c.html"]
    cfg = composed("report", with_run("report", given))
    assert cfg.run == given[:2]
    assert cfg.output == "c.html"
    assert composed("export", with_run("export", ["a/b=1.ckpt"])).run == "a/b=1.ckpt"
    assert with_run("dashboard", ["a/b"]) == ["a/b"]
