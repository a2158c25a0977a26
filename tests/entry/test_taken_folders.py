"""A run folder belongs to one run: a second one is refused before anything in it is written."""

from __future__ import annotations

import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from rlhf_lightning.app.config.compose import composed
from rlhf_lightning.app.config.inherit import command_settings
from rlhf_lightning.app.run_claim import check_folder
from rlhf_lightning.app.train import main, run
from rlhf_lightning.runs.doctor_log import DoctorEvent, write_events
from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.lock import (
    FolderTakenError,
    check_free,
    claim_run,
    drop_refused,
    drop_unused,
    take_run,
)
from rlhf_lightning.runs.summary import new_summary, read_summary, write_summary
from tests.builders.command_lines import environment, overrides_of
from tests.builders.processes import run_python
from tests.builders.runs import completed, killed, settings_for

pytestmark = pytest.mark.timeout(240)


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Return bytes and time of change of each file, by its name."""
    return {
        str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_a_run_that_could_be_continued_is_not_begun_anew_and_goes_on_with_resume_auto(
    start, tmp_path
):
    folder = killed(tmp_path / "sft", "sft", start)
    before = contents(folder.path)
    with pytest.raises(FolderTakenError, match=r"iteration=000003\.ckpt"):
        run(settings_for("sft", start), folder, [])
    assert contents(folder.path) == before
    again = settings_for("sft", start, "resume=auto")
    write_summary(folder, new_summary("sft", seed=1, config_hash=again.config_hash))
    assert run(again, folder, []).status == "completed"
    with pytest.raises(FolderTakenError, match="completed"):
        run(again, folder, [])


def test_a_run_that_is_continued_goes_on_in_its_own_folder_alone(tmp_path, start):
    begun = RunFolder(tmp_path / "thesis/outputs/sft/1").create()
    checkpoint = begun.checkpoints / "iteration=000001.ckpt"
    write_summary(begun, new_summary("sft", seed=1, config_hash="x"))
    (tmp_path / "thesis/report.html").write_text("mine")
    own = settings_for("sft", start, f"ckpt_path='{checkpoint}'")
    check_folder(own, begun)
    with pytest.raises(FolderTakenError, match="thesis"):
        check_folder(own, RunFolder(tmp_path / "thesis"))


def test_a_run_that_ended_before_its_first_checkpoint_may_be_begun_anew(tmp_path):
    folder = RunFolder(tmp_path / "run").create()
    begun = new_summary("sft", seed=1, config_hash="x")
    write_summary(folder, replace(begun, status="failed"))
    check_free(folder, "sft")
    with pytest.raises(FolderTakenError, match=r"sft, failed"):
        check_free(folder, "ppo")
    folder.summary.write_text("{")
    with pytest.raises(FolderTakenError, match=r"summary\.json"):
        check_free(folder, "sft")


def test_what_the_doctor_said_of_a_run_without_a_checkpoint_is_not_said_of_the_next(
    start, tmp_path
):
    folder = RunFolder(tmp_path / "run").create()
    write_events(folder.doctor, [DoctorEvent(1, "alert", "kl", "alarm", "it is high")])
    begun = new_summary("sft", seed=1, config_hash="x")
    assert write_summary(folder, replace(begun, status="failed")).alerts
    assert run(settings_for("sft", start), folder, []).status == "completed"
    assert read_summary(folder).alerts == ()


def test_what_a_start_left_before_its_summary_is_taken_again_and_removed_by_name(tmp_path):
    begun, other = RunFolder(tmp_path / "begun").create(), RunFolder(tmp_path / "other").create()
    with claim_run(begun.path):
        (begun.path / ".hydra").mkdir()
        for name in (".hydra/config.yaml", "train.log"):
            (begun.path / name).write_text("x")
    check_free(begun, "sft", log="train.log")
    (killed := begun.path / ".summary.json.tmp-7").touch()  # in its first write of a summary
    check_free(begun, "sft", log="train.log")
    killed.unlink()
    (begun.path / "server.log").write_text("three weeks")
    with pytest.raises(FolderTakenError, match=r"server\.log"):
        check_free(begun, "sft", log="train.log")
    drop_unused(begun, other, "train.log", link=True)
    assert (begun.path / ".hydra/config.yaml").is_file()
    (begun.path / "server.log").unlink()
    drop_unused(begun, other, "train.log", link=True)
    assert begun.path.resolve() == other.path.resolve()


def test_a_folder_that_was_made_for_a_refused_run_goes_and_what_else_is_there_stays(tmp_path):
    (tmp_path / "mine").mkdir()
    for name in ("mine", "made/by/us", "notes/run", "shared/run"):
        take_run(tmp_path / name)
        (tmp_path / name / ".hydra").mkdir()
    (tmp_path / "notes/run/notes.txt").write_text("x")
    (tmp_path / "shared/other").mkdir()
    with claim_run(tmp_path / "begun"):
        (tmp_path / "begun/summary.json").write_text("{}")
        drop_refused("train.log")
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_dir()}
    kept = {"mine", "mine/.hydra", "notes", "notes/run", "notes/run/.hydra"}
    assert left == kept | {"shared", "shared/other", "begun"}


NAMED = ("dataset.path=ROWS", "dataset.name=nosuch")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("train", ["+experiment=sft", "ckpt_path=nosuch.ckpt"]),
        ("evaluate", ["human=import", "people.run=nosuch"]),
        ("train", ["sft", "START", "ROWS"]),  # by the last row, after torch
        ("train", ["sft", "START", "FEW"]),  # fewer than a batch
        ("train", ["sft", "BROKEN", "FEW", "data.batch_size=4"]),  # after wandb was started
        ("evaluate", ["policy=START", "baseline=START", "dataset=files", *NAMED]),
    ],
)
def test_a_command_that_is_refused_leaves_no_folder(tmp_path, start, command, words):
    rows, here = tmp_path / "nosuch.jsonl", tmp_path / "here"
    few, broken = tmp_path / "few.jsonl", tmp_path / "nosuch"
    few.write_text("".join(f'{{"prompt": "{n}", "completion": "c"}}\n' for n in range(40)))
    rows.write_text(few.read_text() + '{"prompt": 1}\n')
    shutil.copytree(start, broken)
    (broken / "model.safetensors").write_text("x")
    here.mkdir()
    named = {"START": start, "ROWS": rows, "FEW": few, "BROKEN": broken}
    given = [re.sub("[A-Z]{3,}", lambda name: str(named[name[0]]), word) for word in words]
    words = ("-m", f"rlhf_lightning.{command}", *given)
    done = run_python(*words, folder=here, environment=environment())
    assert done.returncode == 2, done.stderr
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("error: "))
    assert "nosuch" in line or "batch_size=128 is more than the" in line
    assert list(here.iterdir()) == []


SOMEBODY_ELSES = ("report.html", "server.log", ".hydra/config.yaml", "runs/1/events")
ELSEWHERE = {
    "run": ["hydra.run.dir=MINE"],
    "sweep": ["-m", "hydra.sweep.dir=MINE", "seed=1,2"],
    "publication": ["artifacts.publish=MINE"],
    "a finished run": ["hydra.run.dir=MINE", "seed=2"],
}


@pytest.mark.thorough
@pytest.mark.parametrize("case", ELSEWHERE)
def test_a_command_line_that_leads_into_a_folder_with_files_is_one_line(
    tmp_path, start, case, monkeypatch, capsys
):
    mine = tmp_path / "mine"
    if case == "a finished run":
        completed(mine, "sft", start)
        assert {"summary.json", "report.html", ".lock"} <= set(contents(mine))
    for name in SOMEBODY_ELSES if case != "a finished run" else ():
        (mine / name).parent.mkdir(parents=True, exist_ok=True)
        (mine / name).write_text("my thesis")
    before = contents(tmp_path)
    words = [word.replace("MINE", str(mine)) for word in ELSEWHERE[case]]
    monkeypatch.chdir(tmp_path)
    flags = [word for word in words if word == "-m"]
    words = [*flags, *overrides_of("sft", start), *words[len(flags) :]]
    monkeypatch.setattr(sys, "argv", ["train", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    line = capsys.readouterr().err
    assert "hydra." in line or "artifacts.publish=" in line
    assert contents(tmp_path) == before


def test_every_command_looks_at_its_folder(tmp_path):
    (tmp_path / "runs").mkdir()  # as TensorBoard makes it
    (tmp_path / "runs/events").write_text("x")
    for entry in ("pipeline", "collect", "evaluate"):
        settings = command_settings(entry, composed(entry, []), [])
        with pytest.raises(FolderTakenError, match="holds runs"):
            check_folder(settings, RunFolder(tmp_path))
