"""A checkout, an editable install and a wheel all find `conf/` and `sweeps/`, from any folder."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TRAIN = ["-m", "rlhf_lightning.train", "+experiment=ppo", "--cfg", "job"]
WHERE = ["-c", "import rlhf_lightning; print(rlhf_lightning.__file__)"]


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    """Run a command and return what it prints; a failure shows its error output."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    result = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, f"{command} failed:\n{result.stdout}\n{result.stderr}"
    return result.stdout


def make_environment(folder: Path) -> Path:
    """Make an environment that sees the packages of this one, but not this project.

    A path that a `.pth` file adds is not searched for further `.pth` files, so an editable install
    in the outer environment stays invisible.
    """
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    python = folder / "bin" / "python"
    inner = run(python, "-c", "import sysconfig as s; print(s.get_path('purelib'))", cwd=folder)
    Path(inner.strip(), "outer.pth").write_text(sysconfig.get_path("purelib") + "\n")
    assert (
        run(python, "-c", "import importlib.util as u; print(u.find_spec('hydra'))", cwd=folder)
        != "None\n"
    )
    return python


def install(python: Path, *what: str | Path) -> None:
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index"]
    run(*pip, "--no-deps", "--no-build-isolation", *what, cwd=python.parent)


def build_wheel(folder: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-index", "--no-deps"]
    run(*pip, "--no-build-isolation", "-w", folder, ROOT, cwd=folder)
    (wheel,) = folder.glob("*.whl")
    return wheel


def shipped(source: str) -> set[str]:
    """Name the YAML files below `conf/` or `sweeps/` as they stand in the wheel."""
    files = (ROOT / source).rglob("*.yaml")
    return {f"rlhf_lightning/{file.relative_to(ROOT).as_posix()}" for file in files}


@pytest.mark.thorough
@pytest.mark.timeout(240)
def test_checkout_editable_and_wheel_compose_the_same_experiment_anywhere(tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path)
    names = set(zipfile.ZipFile(wheel).namelist())
    assert "rlhf_lightning/conf/experiment/ppo.yaml" in names
    assert shipped("conf") | shipped("sweeps") <= names
    assert any(name.startswith("rlhf_lightning/sweeps/") for name in names)
    files = (ROOT / "rlhf_lightning").rglob("*.*")
    assets = {f.relative_to(ROOT).as_posix() for f in files if f.suffix not in (".pyc", ".py")}
    assert {Path(name).suffix for name in assets} >= {".html", ".css", ".js", ".svg", ".md"}
    assert assets <= names
    assert not [name for name in names if name.startswith(("tests/", "docs/"))]

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    editable = make_environment(tmp_path / "editable")
    install(editable, "-e", ROOT)
    installed = make_environment(tmp_path / "installed")
    install(installed, wheel)

    in_checkout = {"PYTHONPATH": str(ROOT)}
    assert Path(run(sys.executable, *WHERE, cwd=elsewhere, **in_checkout).strip()).is_relative_to(
        ROOT
    )
    assert Path(run(editable, *WHERE, cwd=elsewhere).strip()).is_relative_to(ROOT)
    assert Path(run(installed, *WHERE, cwd=elsewhere).strip()).is_relative_to(tmp_path)

    composed = run(sys.executable, *TRAIN, cwd=elsewhere, **in_checkout)
    assert "kl_coef: 0.05" in composed
    assert run(editable, *TRAIN, cwd=elsewhere) == composed
    assert run(installed.parent / "rlhf-train", *TRAIN[2:], cwd=elsewhere) == composed
    assert not list(elsewhere.iterdir()), "composing alone must not write anything"
