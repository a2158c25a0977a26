"""The command that a run's page prints under "Next": it composes where the run was started."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest
import yaml

from rlhf_lightning.app.config.compose import ConfigError, composed
from rlhf_lightning.app.config.ways import spelled_out
from rlhf_lightning.app.next_command import after_collecting, after_training
from rlhf_lightning.runs.folder import RunFolder
from tests.builders.command_lines import LENGTH_REWARD, settings_of
from tests.entry.test_run_of_training import run_of

RUN = "outputs/a run/1"
SMALL, FILE = "model=smollm2_135m", ["dataset=files", "dataset.name=mine"]


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, keys in {"demos": ["completion"], "pairs": ["chosen", "rejected"]}.items():
        rows = [{"prompt": f"Say {n}.", **{key: f"{n} {key}" for key in keys}} for n in range(40)]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text(text)
    (tmp_path / "reward.py").write_text(LENGTH_REWARD)


def printed(
    words: list[str], place: str = "outputs/a run/1", **config: int
) -> tuple[str, list[str]]:
    """Return what is told after a run of these words, and the words of the command.

    `config` is that of the exported model.
    """
    folder = run_of(Path(place), *words)
    with_hydra = composed("train", words)
    runtime = {"choices": dict(with_hydra.hydra.runtime.choices), "cwd": str(Path.cwd())}
    text = yaml.safe_dump({"hydra": {"runtime": runtime}})
    folder.config.with_name("hydra.yaml").write_text(text)
    folder.export.mkdir()
    (folder.export / "config.json").write_text(json.dumps(config))
    told, _, command = after_training(settings_of(*words), folder, words).partition("\n")
    assert not command or command.startswith("rlhf-") or " -m rlhf_lightning." in command
    return told, shlex.split(command)


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["base", "seed=3"], ["sft", "seed=3"]),
        (["sft", "dataset=tldr", "model=smollm2_135m"], ["reward", "dataset=tldr"]),
        (["reward", "dataset=tldr", "model=smollm2_135m"], ["ppo", "dataset=tldr"]),
    ],
)
def test_the_next_stage_has_the_model_and_the_dataset_of_the_run(words, wanted):
    words, wanted = ([f"+experiment={name}", *more] for name, *more in (words, wanted))
    _, command = printed(words)
    settings = settings_of(*command[command.index(wanted[0]) :])
    assert {*wanted} <= {*command}
    assert "outputs/a run/1/export" in settings.artifacts.models().values()
    assert settings.model.name == settings_of(*words).model.name


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["sft", "org/m", "demos.jsonl", SMALL], ["dpo", RUN, "PREFERENCES", SMALL]),
        (["+experiment=base", *FILE, "dataset.path=demos.jsonl"], ["sft", RUN, "demos.jsonl"]),
        (
            ["reward", "org/m", "pairs.jsonl"],
            ["ppo", "org/m", "pairs.jsonl", "--reward-model", RUN],
        ),
        (["dpo", "org/m", "pairs.jsonl"], [RUN, "org/m"]),
    ],
)
def test_a_run_on_a_file_goes_on_in_the_short_way(words, wanted):
    told, command = printed(spelled_out(words))
    assert command[-len(wanted) :] == wanted
    assert ("PREFERENCES is your file" in told) == ("PREFERENCES" in wanted)


def test_the_next_command_reads_the_file_beside_that_of_the_run():
    shutil.copy("pairs.jsonl", "preferences.jsonl")
    assert printed(spelled_out(["sft", "org/m", "demos.jsonl"]))[1][-1] == "preferences.jsonl"


def test_the_evaluation_of_a_policy_names_again_what_a_folder_is_not_trusted_with():
    words = spelled_out(["grpo", "org/m", "demos.jsonl", "--reward", "reward.py:score"])
    _, command = printed(words, "outputs/grpo/1")
    with pytest.raises(ConfigError, match=r"name it again .*--reward FILE\.py:NAME"):
        settings_of("run=outputs/grpo/1", entry="evaluate")
    again = spelled_out(command[command.index("run=outputs/grpo/1") :], "evaluate")
    assert command[-2:] == ["--reward", "reward.py:score"]
    settings = settings_of(*again, entry="evaluate")
    assert settings.policy == "outputs/grpo/1/export"
    assert settings.dataset == settings_of(*words).dataset
    assert settings.prompts.split in (None, "auto")


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["annotator=demo"], "+experiment=reward"),
        (["records=demonstrations", "artifacts.reward=org/r"], "+experiment=sft"),
    ],
)
def test_the_stage_after_a_collection_reads_its_records(words, wanted):
    words = [*words, "artifacts.sft=org/policy", "artifacts.base=null"]
    folder = RunFolder(Path("outputs/collect/1"))
    settings = settings_of(*words, entry="collect")
    _, _, command = after_collecting(settings, folder, words, folder.path / "data").partition("\n")
    read = shlex.split(command)
    stage = settings_of(*read[read.index(wanted) :])
    own = stage.data.get("source") or {}
    assert "outputs/collect/1/data" in (stage.data.get("path"), own.get("path"))
    assert stage.start == "org/policy"
    assert stage.dataset.name == settings.dataset.name
