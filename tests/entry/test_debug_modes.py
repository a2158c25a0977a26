"""`debug=fast|overfit|one_batch|profile`: what they run, write and leave alone."""

from __future__ import annotations

import gzip
import json

import pytest

from rlhf_lightning.app.config.saved import write_settings
from rlhf_lightning.app.train import run
from rlhf_lightning.reports.page import next_step
from rlhf_lightning.runs.folder import RunFolder, read_metrics
from rlhf_lightning.runs.summary import read_summary
from rlhf_lightning.runs.verdict import verdict
from tests.builders.command_lines import settings_of
from tests.builders.runs import completed

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("working_folder")]


@pytest.mark.thorough
def test_overfit_learns_one_batch_by_heart_and_publishes_nothing(start, tmp_path):
    published = tmp_path / "published"
    folder = completed(
        tmp_path / "run",
        "sft",
        start,
        "debug=overfit",
        f"artifacts.publish={published}",
        "module.sft.learning_rate=0.02",
        "callbacks.checkpoint.every_n_iterations=100",
    )
    losses = [row["sft/loss"] for row in read_metrics(folder.metrics)]
    assert len(losses) == 60
    assert min(losses[-5:]) < 0.25 * losses[0]
    assert not published.exists()


@pytest.mark.thorough
def test_fast_shows_that_it_runs_and_judges_nothing(tmp_path):
    few = ["+dataset.source.num_demonstrations=64", "+dataset.source.num_preferences=64"]
    few += ["data.batch_size=8", "evaluation.num_prompts=4", "logger=none"]
    few += ["data.num_generations=2", "doctor=preflight"]
    own = [f"paths.artifacts={tmp_path}/models", f"paths.outputs={tmp_path}/runs"]
    settings = settings_of("+experiment=grpo", "debug=fast", *few, *own)
    folder = RunFolder(tmp_path / "run")
    summary = run(settings, folder, [])
    assert (summary.status, summary.judged, summary.gates) == ("completed", False, ())
    assert len(read_metrics(folder.metrics)) == 3
    found = verdict(read_summary(folder))
    assert (found.tone, found.number) == ("neutral", "")
    assert "without debug=fast" in next_step(read_summary(folder), folder)
    assert not read_summary(folder).alerts
    made = sorted(path.name for path in (tmp_path / "models/debug_fast/demo_seed1").iterdir())
    assert [name for name in made if "." not in name] == ["grpo", "reward", "sft"]
    assert len(list((tmp_path / "models").iterdir())) == 1, "no artifact is replaced"


def test_an_evaluation_of_a_run_that_only_shows_that_it_runs_judges_nothing_either(tmp_path):
    trained = settings_of("+experiment=ppo", "debug=fast")
    folder = RunFolder(tmp_path / "run")
    folder.config.parent.mkdir(parents=True)
    write_settings(folder.config, trained)
    words = [f"run={folder.path}", "gates=by_dataset/ppo"]
    settings = settings_of(*words, entry="evaluate")
    assert settings.only_runs
    assert settings.gates == {}
    assert settings.policy == str(folder.export)
    assert settings.baseline == trained.artifacts.sft
    write_settings(folder.config, settings_of("+experiment=ppo"))
    settings = settings_of(*words, entry="evaluate")
    assert not settings.only_runs
    assert settings.gates


@pytest.mark.thorough
def test_profile_writes_where_the_time_went_and_a_trace(start, tmp_path):
    folder = completed(tmp_path / "run", "ppo", start, "debug=profile", "artifacts.reward=null")
    table = (folder.profile / "table.txt").read_text()
    assert table.startswith("2 iterations profiled, ")
    for part in ("time/update", "time/generate", "time/score", "everything else", "Self CPU"):
        assert part in table
    with gzip.open(folder.profile / "trace.json.gz") as file:
        trace = json.load(file)
    names = {event.get("name") for event in trace["traceEvents"]}
    assert {"aten::mm", "aten::addmm"} & names


@pytest.mark.thorough
def test_one_batch_goes_through_everything_and_is_shown(start, tmp_path, capsys):
    folder = completed(tmp_path / "run", "reward", start, "debug=one_batch")
    assert len(read_metrics(folder.metrics)) == 1
    assert folder.report.exists()
    assert "chosen" in capsys.readouterr().out
