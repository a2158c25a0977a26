"""`python -m rlhf_lightning.collect`: killed and resumed, waiting for people, refusals."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from rlhf_lightning.app.collect import publishing_to, read_prompts
from rlhf_lightning.data.demo.source import DemoSource
from rlhf_lightning.preferences.annotation.store import LabelStore
from rlhf_lightning.preferences.annotators import STORE, PeopleNeededError
from rlhf_lightning.preferences.records import Label, Pair, read_records
from rlhf_lightning.runs.folder import RunFolder, read_samples
from tests.builders.command_lines import settings_of
from tests.builders.processes import ForkedPython
from tests.builders.runs import completed

pytestmark = pytest.mark.timeout(600)
NOW = "2026-11-02T09:30:00+00:00"
SMALL = [
    "artifacts.base=null",
    "candidates.num_prompts=24",
    "candidates.max_new_tokens=8",
    "candidates.batch_size=6",
    "lab.keep_unfinished=true",
    "lab.num_pairs=40",
    "budget.validation_share=0.2",
]
# The tiny policy's answers are all bad: people who can be of two minds about them.
DECIDED = [
    "annotator.automatic.manners.tie_below=0.0",
    *(f"annotator.people.members.{name}.tie_below=0.0" for name in ("careful", "usual", "hasty")),
]


def command(start: Path, *overrides: str) -> list[str]:
    module = [sys.executable, "-m", "rlhf_lightning.collect"]
    return [*module, f"artifacts.sft={start}", *SMALL, *overrides]


def collect_here(folder: Path, start: Path, *overrides: str) -> None:
    """Run it in this process, as the command line does."""
    from rlhf_lightning.app.collect import run

    given = [f"artifacts.sft={start}", *SMALL, *overrides]
    settings = settings_of(*given, entry="collect")
    run(settings, RunFolder(folder / "outputs/collect/9999-01-01_00-00-00"), given)


def runs(folder: Path) -> list[Path]:
    return sorted((folder / "outputs/collect").iterdir())


def labels(run: Path) -> set[tuple[str, str, str]]:
    found = [(x.pair_id, x.annotator, x.choice) for x in read_records(Label, run / "labels.jsonl")]
    assert len(set(found)) == len(found)
    return set(found)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, start: Path) -> Path:
    """The folder of a run that nothing interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        collect_here(folder, start, *DECIDED)
    return folder


@pytest.mark.thorough
def test_a_run_that_is_killed_goes_on_to_the_same_records(
    tmp_path: Path, start: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = ForkedPython(command(start, *DECIDED)[1:], tmp_path, os.environ, tmp_path / "log")
    deadline = time.monotonic() + 400
    while not list(tmp_path.glob("outputs/collect/*/candidates.journal.jsonl")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    (killed,) = runs(tmp_path)
    assert json.loads((killed / "summary.json").read_text())["status"] == "running"
    assert not (killed / "data").exists()

    monkeypatch.chdir(tmp_path)
    collect_here(tmp_path, start, *DECIDED, "resume=auto")
    (resumed,), (other,) = runs(tmp_path), runs(whole)
    for name in ("candidates.jsonl", "pairs.jsonl", "data/train.jsonl", "data/validation.jsonl"):
        assert (resumed / name).read_bytes() == (other / name).read_bytes(), name
    assert labels(resumed) == labels(other)
    assert len((resumed / "data/train.jsonl").read_text().splitlines()) > 4
    summary = json.loads((resumed / "summary.json").read_text())
    assert (summary["stage"], summary["status"]) == ("collect", "completed")
    assert 0.5 <= summary["metrics"]["val/label_ceiling"] <= 1.0
    published = tmp_path / "artifacts/demo_seed1/preferences"
    for name in ("train.jsonl", "validation.jsonl", "reliability.json"):
        assert (published / name).read_bytes() == (resumed / "data" / name).read_bytes()


@pytest.mark.thorough
def test_the_reward_stage_trains_on_the_records_and_reports_their_ceiling(
    tmp_path: Path, start: Path, whole: Path
) -> None:
    records = whole / "artifacts/demo_seed1/preferences"
    made = completed(tmp_path / "run", "reward", start, f"data.path={records}")
    figures = json.loads((records / "reliability.json").read_text())
    metrics = json.loads((made.path / "summary.json").read_text())["metrics"]
    assert metrics["val/label_ceiling"] == figures["label_ceiling"]
    held_out = [json.loads(x) for x in (records / "validation.jsonl").read_text().splitlines()]
    by_domain = {
        row["domain"]: metrics[f"val/num_pairs/domain/{row['domain']}"] for row in held_out
    }
    assert sum(by_domain.values()) == figures["records"]["validation"]["kept"] == len(held_out)
    assert 0.0 <= metrics["val/accuracy"] <= 1.0


@pytest.mark.thorough
def test_a_policy_of_other_pairs_is_compared_on_the_prompts_of_the_data_set(
    tmp_path: Path, start: Path
) -> None:
    """As `rlhf-pipeline` trains on the pairs that were collected: the figures stay comparable."""
    held_out = {r.prompt for r in DemoSource(seed=1).records("prompts", "validation")}
    pairs = DemoSource(seed=1, num_preferences=24).records("preferences", "train")
    rows = [
        {"prompt": f"{r.prompt} {r.prompt}", "chosen": r.chosen, "rejected": r.rejected}
        for r in pairs
    ]
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = completed(tmp_path / "run", "dpo", start, f"data.path={file}")
    samples = read_samples(made.samples)
    assert samples
    assert {sample["prompt"] for sample in samples} <= held_out


@pytest.mark.thorough
def test_people_label_at_the_page_and_the_run_goes_on(
    tmp_path: Path, start: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = ["annotator=page", "budget.validation_votes=2"]
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PeopleNeededError, match=r"store=.*people\.sqlite"):
        collect_here(tmp_path, start, *page)
    (run,) = runs(tmp_path)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == "stopped"
    assert "resume=auto" in summary["cause"]
    with LabelStore(run / STORE) as store:
        asked = list(store.pairs())
        wanted = store.progress().wanted
        twice = asked[: wanted - len(asked)]
        for rater, pairs, choice in (("ada", asked, "first"), ("bob", twice, "second")):
            store.add_labels(
                Label(p.pair_id, rater, choice, "person", "first", NOW, seconds=10.0) for p in pairs
            )
    assert 0 < len(asked) <= len(list(read_records(Pair, run / "pairs.jsonl")))
    collect_here(tmp_path, start, *page, "resume=auto")
    assert runs(tmp_path) == [run]
    figures = json.loads((run / "data/reliability.json").read_text())
    assert figures["people"]["raw_agreement"] == 0.0
    assert figures["records"]["validation"]["left_out"] == {
        "no majority among the votes": figures["pairs"]["validation"]
    }
    assert figures["cost"]["after"]["measured"] is True
    assert figures["cost"]["after"]["hours"] == pytest.approx(wanted * 10 / 3600)


def test_adversarial_pairs_do_not_replace_the_collection_that_was_published(tmp_path: Path) -> None:
    words = [f"adversarial.run={tmp_path}", "artifacts.reward=reward"]
    assert publishing_to(settings_of(*words, entry="collect"), words) is None
    named = [*words, "artifacts.publish=elsewhere"]
    assert publishing_to(settings_of(*named, entry="collect"), named) == "elsewhere"
    assert publishing_to(settings_of(entry="collect"), []).endswith("preferences")


def test_a_prompt_of_several_rows_has_the_columns_of_the_first(tmp_path: Path, start: Path) -> None:
    rows = [{"prompt": prompt, "answer": str(n)} for n, prompt in enumerate("ABA")]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [f"artifacts.sft={start}", "artifacts.base=null", "dataset=files", "dataset.name=mine"]
    words += [f"dataset.path={file}", "dataset.source.validation_fraction=0", "annotator=page"]
    records = read_prompts(settings_of(*words, entry="collect"))
    assert [(record.prompt, record.columns["answer"]) for record in records] == [
        ("A", "0"),
        ("B", "1"),
    ]
