"""Every command answers what is mistyped in one line, with the same words, and its help at once."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest
import yaml

import rlhf_lightning
from rlhf_lightning.app.command_line import with_run
from rlhf_lightning.app.config.commands import COMMANDS, RUNS
from rlhf_lightning.app.config.compose import composed, conf_dir, register

COMMANDS_ALONE = sorted(set(COMMANDS) - set(RUNS))
NOTHING = "sets nothing: write KEY=VALUE"


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        ("export", [], "run is not set: add run=..."),
        ("export", ["RUN", "dtyp=fp32"], "unknown key dtyp; did you mean dtype?"),
        ("export", ["RUN", "dtype=fp8"], "dtype='fp8' must be 'auto', 'fp32' or 'bf16'"),
        ("export", ["RUN", "public=maybe"], "public='maybe' is str, expected bool"),
        ("export", ["RUN", "OTHER"], "run=['RUN', 'OTHER'] is list, expected a path"),
        ("export", ["run=5"], "run=5 is int, expected a path"),
        ("export", ["RUN", "--to", "x"], f"'--to' {NOTHING}"),
        ("export", ["it's/a=1.ckpt"], "it's/a=1.ckpt does not exist: give a run folder, or"),
        ("report", [], "run is not set: add run=..."),
        ("report", ["run=[]"], "run=[] must be"),
        ("report", ["RUN", "outptu=x"], "unknown key outptu; did you mean output?"),
        ("report", ["RUN", "output=3"], "output=3 is int, expected a path or None"),
        ("report", ["A, B"], "A, B is no run folder: it has no summary.json; runs are in outputs/"),
        ("plan", [], "stage=None: choose what to train with +experiment=NAME, one of base, "),
        ("plan", ["RUN"], f"'RUN' {NOTHING}"),
        ("plan", ["+experiment=ppo", "sed=2"], "unknown key sed; did you mean seed"),
        (
            "plan",
            ["+experiment=ppo", "plan.device_memry=80GiB"],
            "unknown key plan.device_memry; did you mean plan.device_memory",
        ),
        (
            "plan",
            ["+experiment=ppo", "plan.device=tpu"],
            "plan.device='tpu' must be 'auto', 'cpu' or 'cuda'",
        ),
        (
            "plan",
            ["+experiment=ppo", "plan.device_memory=much"],
            "plan.device_memory='much' is no size: write 80GiB",
        ),
        ("annotate", ["RUN"], f"'RUN' {NOTHING}"),
        ("annotate", ["actoin=serve"], "unknown key actoin; did you mean action?"),
        ("annotate", ["file=3"], "file=3 is int, expected a path or None"),
        ("annotate", ["page.port=70000"], "page.port=70000 must be <= 65535"),
        ("dashboard", ["RUN"], f"'RUN' {NOTHING}"),
        ("dashboard", ["projct=x"], "unknown key projct; did you mean project?"),
        ("dashboard", ["name=null"], "name=None is NoneType, expected str"),
        ("dashboard", ["compare=[a]"], "compare has 1 runs: give two, or none"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_key(
    working_folder, monkeypatch, capsys, command, arguments, message
):
    monkeypatch.setattr(sys, "argv", [f"rlhf-{command}", *arguments])
    with pytest.raises(SystemExit) as caught:
        import_module(f"rlhf_lightning.{command}").main()
    assert caught.value.code == 2
    said = capsys.readouterr()
    assert said.err.startswith(f"error: {message}"), said.err
    assert said.err.count("\n") == 1
    assert said.out == ""


@pytest.mark.thorough
@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_help_begins_with_a_sentence_and_names_the_command_and_loads_no_torch(command):
    code = (
        f"import sys; sys.argv = ['x', '--help']; from rlhf_lightning.{command} import main\n"
        "try:\n    main()\nexcept SystemExit as left:\n    assert left.code == 0\n"
        "heavy = {'torch', 'lightning', 'transformers', 'wandb', 'numpy', 'starlette'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout[0].isupper()
    assert f"rlhf_lightning.{command}" in done.stdout
    assert done.stdout.endswith("[]\n")


@pytest.mark.parametrize("command", [name for name in COMMANDS_ALONE if name != "plan"])
def test_the_file_of_a_command_and_its_settings_have_the_same_keys(command):
    written = yaml.safe_load((conf_dir() / f"{command}.yaml").read_text())
    groups = {next(iter(item)) for item in written.pop("defaults", []) if isinstance(item, dict)}
    assert (set(written) | groups) - {"hydra"} == set(COMMANDS[command].model_fields)


@pytest.mark.parametrize("command", ["train", "report"])
def test_the_version_is_our_own(command, monkeypatch, capsys):
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
