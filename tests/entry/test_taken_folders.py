"""A run folder belongs to one run: a second one is refused before anything in it is written."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from rlhf_lightning.app.train import run
from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.lock import FolderTakenError, claim_run, is_claimed, take_run
from rlhf_lightning.runs.summary import Summary, new_summary, write_summary
from rlhf_lightning.runs.taken import check_free
from tests.builders.command_lines import environment, overrides_of
from tests.builders.runs import completed, settings_for

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, start: Path) -> RunFolder:
    return completed(tmp_path_factory.mktemp("runs") / "sft", "sft", start)


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Return bytes and time of change of each file, by its name."""
    return {
        str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file()
    }


def command(module: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", f"rlhf_lightning.{module}", *arguments],
        cwd=folder,
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    "more", ["seed=2", "--config-dir=.", pytest.param("resume=auto", marks=pytest.mark.slow)]
)
def test_the_folder_of_a_finished_run_is_left_as_it_is(finished, start, tmp_path, more):
    before = contents(finished.path)
    assert {"summary.json", "report.html", ".hydra/config.yaml", ".lock"} <= set(before)
    own = [*overrides_of("sft", start), f"hydra.run.dir={finished.path}"]
    done = command("train", tmp_path, *own, more)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: the folder {finished.path} holds a finished run (sft)")
    assert line.endswith("hydra.run.dir=")
    assert contents(finished.path) == before


@pytest.mark.parametrize(
    "module",
    ["collect", *(pytest.param(m, marks=pytest.mark.slow) for m in ("evaluate", "pipeline"))],
)
def test_no_other_command_takes_it_either(finished, tmp_path, module):
    before = contents(finished.path)
    done = command(module, tmp_path, f"hydra.run.dir={finished.path}")
    assert done.returncode == 2
    assert "holds a finished run (sft)" in done.stderr
    assert contents(finished.path) == before


def test_a_run_without_hydra_is_refused_as_well(finished, start, tmp_path):
    before = contents(finished.path)
    with pytest.raises(FolderTakenError, match="finished run"):
        run(settings_for("sft", start), finished, [])
    assert contents(finished.path) == before


def test_a_folder_whose_run_could_be_continued_is_not_begun_anew(sft_with_checkpoints, start):
    folder = sft_with_checkpoints
    before = contents(folder.path)
    with pytest.raises(FolderTakenError, match=r"iteration=000003\.ckpt: continue"):
        run(settings_for("sft", start), folder, [])
    assert contents(folder.path) == before


@pytest.fixture
def sft_with_checkpoints(tmp_path: Path, start: Path) -> RunFolder:
    from tests.builders.runs import killed

    return killed(tmp_path / "sft", "sft", start)


def test_a_run_that_ended_before_its_first_checkpoint_may_be_begun_anew(tmp_path):
    folder = RunFolder(tmp_path / "run").create()
    begun = new_summary("sft", seed=1, config_hash="x")
    write_summary(folder, replace(begun, status="failed"))
    check_free(folder, "sft")
    with pytest.raises(FolderTakenError, match=r"an unfinished run \(sft\)"):
        check_free(folder, "ppo")
    folder.summary.write_text("{")
    with pytest.raises(FolderTakenError, match="cannot be read"):
        check_free(folder, "sft")


def test_of_two_runs_at_once_in_one_folder_one_is_refused_and_writes_nothing(start, tmp_path):
    folder = RunFolder(tmp_path / "run").create()
    (folder.path / "metrics.csv").write_text("iteration\n")
    with claim_run(folder.path):
        before = contents(folder.path)
        done = command(
            "train", tmp_path, *overrides_of("sft", start), f"hydra.run.dir={folder.path}"
        )
        assert done.returncode == 2
        assert f"is in use by process {os.getpid()}" in done.stderr
        assert contents(folder.path) == before


def test_a_folder_that_was_taken_is_locked_until_its_run_has_ended(tmp_path):
    take_run(tmp_path / "run")
    assert not is_claimed(tmp_path / "run")  # by another one than this
    held = "from rlhf_lightning.runs.lock import is_claimed; sys.exit(is_claimed(sys.argv[1]))"
    ask = [sys.executable, "-c", f"import sys; {held}", str(tmp_path / "run")]
    assert subprocess.run(ask, env=environment(), check=False).returncode == 1
    with claim_run(tmp_path / "run"):
        assert is_claimed(tmp_path / "run")
    assert not is_claimed(tmp_path / "run")
    assert subprocess.run(ask, env=environment(), check=False).returncode == 0


def test_a_sweep_does_not_write_into_the_folder_of_another(tmp_path, start):
    sweep = tmp_path / "sweep"
    done_before = RunFolder(sweep / "0").create()
    write_summary(done_before, Summary("sft", "completed", 1))
    (sweep / "multirun.yaml").write_text("hydra: {}\n")
    before = contents(sweep)
    own = [*overrides_of("sft", start), f"hydra.sweep.dir={sweep}", "seed=1,2"]
    done = command("train", tmp_path, "-m", *own)
    assert done.returncode == 2
    assert "holds the runs of another sweep, e.g. 0: choose another folder" in done.stderr
    assert contents(sweep) == before


def test_a_folder_that_cannot_be_made_is_refused_in_one_line(tmp_path, start):
    (tmp_path / "file").write_text("")
    where = tmp_path / "file" / "run"
    for key, flags in (("run", []), ("sweep", ["-m"])):
        done = command(
            "train", tmp_path, *flags, *overrides_of("sft", start), f"hydra.{key}.dir={where}"
        )
        (line,) = done.stderr.splitlines()
        assert done.returncode == 2
        assert line.startswith(f"error: hydra.{key}.dir={where} cannot be written (Not a directory")
