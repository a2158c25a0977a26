"""`python -m rlhf_lightning.study`: the matrix, what goes on, what fails, and its page."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

from rlhf_lightning.app.config.commands import StudySettings
from rlhf_lightning.app.config.compose import choices, conf_dir, register
from rlhf_lightning.app.config.validate import load_settings
from rlhf_lightning.app.study.engine import startable
from rlhf_lightning.app.study.rows import plan
from rlhf_lightning.app.study.study import arguments, main
from rlhf_lightning.app.study.words import varied
from rlhf_lightning.runs.metric_catalog import percent
from tests.builders.command_lines import environment, overrides_of, settings_of

TINY = """
# @package _global_
name: tiny
seeds: [1, 2]
at_kl: [0.001]
measure: [val/gold_win_rate, val/kl_per_token, val/response_length]
"""


def written(folder: Path, start: Path) -> None:
    """Write a study of two rows, one of which names a reward function that does not exist."""
    words = [word for word in overrides_of("ppo", start) if not word.startswith("+experiment")]
    words += ["artifacts.reward=null", "gates=none", "trainer.accelerator=cpu"]
    good = {"experiment": "ppo", "overrides": words}
    bad = {"experiment": "ppo", "overrides": [*words, "scorer.function=nowhere.py:score"]}
    runs = yaml.safe_dump({"runs": {"good": good, "bad": bad}}, width=10_000)
    (folder / "mine" / "study").mkdir(parents=True)
    (folder / "mine" / "study" / "tiny.yaml").write_text(TINY.lstrip() + runs)


def call(folder: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "rlhf_lightning.study", "tiny", *words]
    return subprocess.Popen(
        [*command, "--config-dir", str(folder / "mine")], cwd=folder, env=environment(),
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_study_that_was_stopped_goes_on_names_what_failed_and_shows_what_was_measured(
    tmp_path, start
):
    written(tmp_path, start)
    place = tmp_path / "outputs/studies/tiny"
    first = call(tmp_path)
    until = time.monotonic() + 300
    while not list(place.glob("runs/good/seed_1/*/*/checkpoints/*.ckpt")):
        assert first.poll() is None, first.communicate()[0]
        assert time.monotonic() < until
        time.sleep(0.1)
    first.send_signal(signal.SIGTERM)
    told, _ = first.communicate(timeout=120)
    assert first.returncode == 130, told
    assert json.loads((place / "summary.json").read_text())["status"] == "stopped"
    (begun,) = place.glob("runs/good/seed_1/*/*/summary.json")
    stopped_at = json.loads(begun.read_text())["status"]

    told, _ = (second := call(tmp_path, "seeds=[1]")).communicate(timeout=600)
    assert second.returncode == 1, told
    assert "1 of 2 runs failed: bad seed 1" in told
    (only,) = place.glob("runs/good/seed_1/*/*/summary.json")  # in the same folder
    assert (only, stopped_at) == (begun, "stopped")
    told, _ = (third := call(tmp_path, "jobs=2")).communicate(timeout=600)
    assert third.returncode == 1, told
    assert "4 runs, 1 done before" in told
    assert "2 of 4 runs failed: bad seed 1, bad seed 2" in told
    attempts = (place / "runs/good/seed_1/attempts.jsonl").read_text().splitlines()
    assert len(attempts) == 4  # the begin and the end of two

    page, table = (place / "study.html").read_text(), (place / "study.md").read_text()
    assert "bad seed 1" in page
    assert (
        "nowhere.py"
        in page.partition("<h2>Runs that did not end</h2>")[2].partition("</section>")[0]
    )
    gains = []
    for seed in (1, 2):
        (file,) = place.glob(f"runs/good/seed_{seed}/*/*/summary.json")
        summary = json.loads(file.read_text())
        assert summary["status"] == "completed"
        gains.append(summary["metrics"]["val/gold_win_rate"])
    row = next(line for line in table.splitlines() if line.startswith("| good |  | 2 of 2 |"))
    assert row.split("|")[4].startswith(f" {percent(sum(gains) / 2)} (")
    assert row.split("|")[7].strip() == "12"  # responses sampled: three iterations of four


def composed(*words: str) -> StudySettings:
    register()
    return load_settings(StudySettings, "study", list(words))


ROWS = (
    "+runs.ppo={experiment:ppo,vary:{module.ppo.kl_coef:[0.1,0.2]}}",
    "+runs.score.command=evaluate",
)


@pytest.mark.thorough
def test_the_matrix_has_every_setting_of_a_seed_before_the_next_seed(tmp_path):
    runs = plan(composed(*ROWS, "seeds=[3,4]"), tmp_path)
    assert [run.name for run in runs] == [
        "ppo kl_coef=0.1 seed 3", "ppo kl_coef=0.2 seed 3", "score seed 3",
        "ppo kl_coef=0.1 seed 4", "ppo kl_coef=0.2 seed 4", "score seed 4",
    ]  # fmt: skip
    assert len({run.place for run in runs}) == 6
    assert len({run.settings.config_hash for run in runs}) == 6
    assert [run.answers for run in runs[:3]] == [128, 128, 0]
    assert "resume=auto" in runs[0].command_line()
    assert "resume=auto" not in runs[2].command_line()
    assert runs[1].settings.hparams.kl_coef == 0.2
    assert not runs[1].settings.publishes
    assert runs[0].settings.start.endswith("/studies/study/artifacts/demo_seed3/sft")


def test_every_run_reads_the_experiments_of_the_user(tmp_path, mine):
    (run,) = plan(composed("+runs.one={experiment:mine}"), tmp_path)
    assert run.command_line()[3] == mine  # in front: Hydra's flag
    assert run.settings.name == "mine"


@pytest.mark.thorough
def test_later_words_win_and_a_trial_keeps_its_models_apart(tmp_path):
    words = ["shared.train=['logger=none']", "overrides.train=['logger=csv','debug=fast']"]
    run, *_ = plan(composed(*ROWS, *words), tmp_path)
    assert run.settings.logger.kind == "csv"
    assert run.settings.start.endswith("/artifacts/debug_fast/demo_seed1/sft")


CHAIN = (
    "+runs.sft={experiment:sft,overrides:['module.sft.learning_rate=1.0e-3']}",
    "+runs.reward={experiment:reward,starts_from:{sft:sft}}",
    "+runs.ppo={experiment:ppo,starts_from:{sft:sft,reward:reward},vary:{module.ppo.kl_coef:[0.1,0.2]}}",
    "+runs.before={command:evaluate,starts_from:{sft:sft}}",
)


@pytest.mark.thorough
def test_a_row_starts_from_the_model_that_another_row_of_its_seed_publishes(tmp_path):
    runs = {run.name: run for run in plan(composed(*CHAIN, "seeds=[2]"), tmp_path)}
    sft, reward, before = (runs[f"{row} seed 2"] for row in ("sft", "reward", "before"))
    for setting in ("kl_coef=0.1", "kl_coef=0.2"):
        ppo = runs[f"ppo {setting} seed 2"]
        assert ppo.settings.artifacts.sft == str(tmp_path / "rows" / sft.model)
        assert ppo.settings.artifacts.reward == str(tmp_path / "rows" / reward.model)
        assert not ppo.settings.publishes
    assert before.settings.artifacts.sft == reward.settings.artifacts.sft
    for maker in (sft, reward):
        command = maker.command_line()
        assert f"+paths.row='{tmp_path / 'rows' / maker.model}'" in command
        assert {"paths.publish=true", "artifacts.publish=${paths.row}"} <= set(command)
    assert len({run.model for run in runs.values()}) == len(runs)
    # As the command itself composes it: the run is found again by this hash.
    words = [word for word in sft.command_line()[3:] if not word.startswith("paths.outputs")]
    read = settings_of(*words)
    assert read.config_hash == sft.settings.config_hash
    assert read.artifacts.publish == reward.settings.artifacts.sft


@pytest.mark.thorough
def test_a_row_may_collect_what_others_train_on_and_any_key_may_name_a_row(tmp_path):
    rows = [
        "+runs.pairs={command:collect,starts_from:{sft:sft}}",
        "+runs.reward_of_pairs={experiment:reward,starts_from:{sft:sft,data.path:pairs}}",
        "+runs.last={command:evaluate,starts_from:{policy:sft}}",
    ]
    runs = {run.row: run for run in plan(composed(*CHAIN[:2], *rows), tmp_path)}
    pairs, reward, last = (runs[row] for row in ("pairs", "reward_of_pairs", "last"))
    assert pairs.settings.artifacts.sft == str(tmp_path / "rows" / runs["sft"].model)
    assert reward.settings.select("data.path") == str(tmp_path / "rows" / pairs.model)
    assert last.settings.policy == pairs.settings.artifacts.sft
    study = composed(*CHAIN[:1], rows[2])
    assert (study.makers, study.begun_from) == ({"sft"}, set()), "what is only measured competes"
    assert "resume=auto" in pairs.command_line()
    words = [word for word in pairs.command_line()[3:] if not word.startswith("paths.outputs")]
    read = settings_of(*words, entry="collect")
    assert read.config_hash == pairs.settings.config_hash
    assert read.artifacts.publish == reward.settings.select("data.path")


@pytest.mark.thorough
def test_a_run_may_start_as_soon_as_its_own_models_are_there(tmp_path):
    alone = "+runs.alone={experiment:ppo}"
    waiting = plan(composed(*CHAIN, alone, "seeds=[1,2]"), tmp_path)
    begun = []

    def begin(count: int) -> list[str]:
        found = startable(waiting, begun)[:count]
        for one in found:
            waiting.remove(one)
            begun.append(one)
        return [f"{one.row} {one.seed}" for one in found]

    def end(row: str) -> None:
        begun.remove(next(one for one in begun if f"{one.row} {one.seed}" == row))

    assert begin(2) == ["sft 1", "alone 1"]
    assert begin(1) == ["sft 2"], "nothing of seed 1 can start"
    end("sft 1")
    assert begin(1) == ["reward 1"]
    end("alone 1")
    assert begin(1) == ["before 1"], "while the reward model is trained"
    end("reward 1")
    assert begin(2) == ["ppo 1", "ppo 1"]
    assert begin(9) == ["alone 2"], "SFT of seed 2 is under way"


@pytest.mark.thorough
def test_other_settings_of_a_row_make_another_model_and_another_place_changes_no_hash(tmp_path):
    def models(folder: Path, *words: str) -> list[str]:
        return [run.model for run in plan(composed(*CHAIN[:2], *words), folder)]

    before = models(tmp_path / "a")
    assert models(tmp_path / "b") == before
    changed = "runs.sft.overrides=['module.sft.learning_rate=2.0e-3']"
    assert not set(before) & set(models(tmp_path / "a", changed)), "all rows start from it"


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=() if n == "objectives" else pytest.mark.slow)
        for n in choices("study")
    ],
)
def test_the_rows_of_a_shipped_study_whose_experiment_there_is_compose(name, tmp_path, monkeypatch):
    for folder in ("RLHF_DATA", "DOCTOR_PAIRS", "SMOLLM2", "BLIMP", "SAFETY"):  # composed, not read
        monkeypatch.setenv(folder, folder.lower())
    content = yaml.safe_load((conf_dir() / "study" / f"{name}.yaml").read_text())
    known = [
        r
        for r, row in content["runs"].items()
        if row.get("experiment") in choices("experiment") or row.get("command") == "collect"
    ]
    assert known
    words = ["seeds=[1]", *(f"~runs.{row}" for row in content["runs"] if row not in known)]
    settings = composed(f"study={name}", *words)
    runs = plan(settings, tmp_path)
    assert len(runs) >= len(known)
    if "SMOLLM2" in (conf_dir() / "study" / f"{name}.yaml").read_text():
        monkeypatch.setenv("SMOLLM2", "another")
        others = plan(composed(f"study={name}", *words), tmp_path)
        assert {run.model for run in runs}.isdisjoint(run.model for run in others)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("", "runs={} is no study: name one of conf/study, rlhf-study NAME"),
        ("objective", "study=objective is none of "),
        ("+runs.a={experiment:ppoo}", "runs.a: experiment=ppoo is none of"),
        ("+runs.a={experiment:ppo,overrides:['nosuch=1']}", "runs.a: unknown"),
        (
            "+runs.a={experiment:ppo,starts_from:{sft:b}} +runs.b={experiment:sft}",
            "runs.a.starts_from.sft=b is no row above it that trains or collects in one "
            "setting; above it: none",
        ),
        (
            "+runs.a={experiment:sft,vary:{k:[1]}} +runs.b={experiment:ppo,starts_from:{sft:a}}",
            "above it: a",
        ),
        ("+runs.a={experiment:ppo,starts_from:{sftt:b}}", "sft"),
        ("+runs.a={}", "a row of train names an experiment"),
        ("+runs.a={experiment:ppo,vary:{seed:[]}}", "runs.a.vary.seed=[] is empty"),
        ("+runs={a/b:{experiment:ppo}}", "use letters, digits"),
        ("+runs.a={experiment:ppo} seeds=[]", "seeds=[] is empty: give"),
        ("+runs.a={experiment:ppo} seeds=[1,1]", "seeds=[1, 1] has a value twice"),
        ("+runs.a={experiment:ppo,vary:{k:[0.1,0.1]}}", "runs.a.vary.k=[0.1, 0.1] has a value"),
        ("+runs.a={experiment:ppo} train:seed=5", "runs.a: seeds=[...] says the seeds"),
        ("+runs.a={experiment:ppo} jobs=0", "jobs=0 must be >= 1"),
        ("+runs.a={experiment:ppo} sedes=[1]", "did you mean seeds"),
        ("+runs.a={experiment:ppo} at_kl=[0]", "at_kl"),
    ],
)
def test_a_mistake_is_answered_in_one_line_and_makes_no_folder(
    words, told, working_folder, monkeypatch, capsys
):
    monkeypatch.setattr(os, "environ", os.environ.copy())  # the command notes its start there
    monkeypatch.setattr(sys, "argv", ["rlhf-study", *words.split()])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert told in said
    assert len(said.splitlines()) == 1
    assert not list(working_folder.iterdir())


@pytest.mark.parametrize(
    ("words", "read"),
    [
        (
            "mine --config-dir my_conf ppo:a=1 name=trial",
            "--config-dir my_conf study=mine name=trial overrides.ppo=['a=1']",
        ),
        ("mine ~runs.dpo -cd=x ~runs.ppo", "-cd=x study=mine ~runs.dpo ~runs.ppo"),
        ("mine name=x --cfg job --resolve", "--cfg job --resolve study=mine name=x"),
    ],
)
def test_words_behind_a_flag_are_words_of_the_study_too(words: str, read: str) -> None:
    assert arguments(words.split()) == read.split()


@pytest.mark.parametrize(
    "value",
    [
        "Résultat:", "\\boxed{", "a\tb", "it's", "plain", "a b", "", "\\'", "end\\",
        0.1, True, None, ["é", 2], {"k": ["\\d", {"l": "é"}]},
    ],
)  # fmt: skip
def test_a_value_that_is_varied_is_the_value_of_the_file(value: object) -> None:
    (read,) = OverridesParser.create().parse_overrides([varied("key", value)])
    assert read.value() == value
