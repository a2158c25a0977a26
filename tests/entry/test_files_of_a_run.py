"""`run=FOLDER` reads a file or model of this machine if it is what the run has read itself."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import yaml

from rlhf_lightning.app.collect import run as collect
from rlhf_lightning.app.config.compose import ConfigError
from rlhf_lightning.app.config.local_files import is_unchanged
from rlhf_lightning.app.config.save import write_settings
from rlhf_lightning.app.evaluate import run as evaluate
from rlhf_lightning.app.study.steps import plan
from rlhf_lightning.app.study.words import quoted
from rlhf_lightning.app.train import run as train
from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.manifest import content_digest
from rlhf_lightning.runs.summary import read_summary
from tests.builders.command_lines import SMALL, settings_of
from tests.entry.test_pipeline import composed

ENTRIES = ("evaluate", "collect")
# The default annotators know the built-in world alone.
LABELS = {
    "evaluate": [],
    "collect": ["annotator=page"],
}
PRIVATE = "my password is swordfish"


def rows(path: Path, text: str = "what is {} ?", count: int = 40) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [{"prompt": text.format(n), "completion": "sum"} for n in range(count)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, start: Path) -> RunFolder:
    folder = tmp_path_factory.mktemp("own")
    model = shutil.copytree(start, folder / "model")
    data = rows(folder / "data.jsonl")
    safety = folder / "safety.jsonl"
    safety.write_text('{"prompt": "sum", "harmful": true}\n{"prompt": "list", "harmful": false}\n')
    template = folder / "turns.jinja"
    template.write_text("{% for message in messages %}{{ message['content'] }} {% endfor %}")
    words = ["+experiment=sft", *(word for word in SMALL if "dataset.source" not in word)]
    words += ["dataset=files", f"dataset.path={data}", "dataset.name=mine"]
    words += ["safety=default", f"safety.prompts={safety}", f"++model.chat_template={template}"]
    settings = settings_of(*words, f"artifacts.base={model}")
    made = RunFolder(folder / "run")
    made.config.parent.mkdir(parents=True)
    write_settings(made.config, settings)
    train(settings, made, [])
    return made


@pytest.fixture
def own(tmp_path: Path, trained: RunFolder) -> RunFolder:
    """Return a copy of the run whose files stand beside it, as its settings say."""
    copied = shutil.copytree(trained.path.parent, tmp_path / "own")
    for file in copied.rglob("*.yaml"):
        file.write_text(file.read_text().replace(str(trained.path.parent), str(copied)))
    return RunFolder(copied / "run")


def changed(folder: RunFolder, key: str, value: object) -> None:
    config = yaml.safe_load(folder.config.read_text())
    node = config
    *parents, last = key.split(".")
    for parent in parents:
        node = node[parent]
    node[last] = value
    folder.config.write_text(yaml.safe_dump(config, sort_keys=False))


def test_ones_own_run_is_evaluated_and_collected_from_without_a_word_more(
    own: RunFolder, tmp_path: Path
) -> None:
    words = [f"run={own.path}", "evaluation.num_prompts=4", "evaluation.max_new_tokens=4"]
    summary = evaluate(settings_of(*words, entry="evaluate"), RunFolder(tmp_path / "e"), words)
    assert summary.status == "completed"
    words = [f"run={own.path}", "candidates.num_prompts=4", "candidates.max_new_tokens=4"]
    words += ["annotator=page", "artifacts.publish=null", "lab.keep_unfinished=true"]
    settings = settings_of(*words, entry="collect")
    with pytest.raises(Exception, match="label"):  # of people
        collect(settings, RunFolder(tmp_path / "c"), words)
    assert (tmp_path / "c" / "summary.json").exists()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("file", "key"),
    [
        ("data.jsonl", "dataset.path"),
        ("turns.jinja", "model.chat_template"),
        ("model/config.json", "artifacts.base"),
        ("safety.jsonl", "safety.prompts"),
    ],
)
def test_what_was_edited_since_is_refused_by_name_until_it_is_named_again(
    own: RunFolder, file: str, key: str
) -> None:
    path = own.path.parent / file
    path.write_text(path.read_text() + "\n")
    named = path.parent if file.startswith("model/") else path
    for entry in ENTRIES if key != "safety.prompts" else ENTRIES[:1]:
        with pytest.raises(ConfigError) as caught:
            settings_of(f"run={own.path}", entry=entry)
        assert f"{key}={named}" in str(caught.value)
        assert "\n" not in str(caught.value)
        settings_of(f"run={own.path}", f"++{key}={named}", *LABELS[entry], entry=entry)


def test_a_file_that_is_named_again_is_the_one_that_is_read(own: RunFolder) -> None:
    other = rows(own.path.parent / "other.jsonl", "what is {} to you ?")
    for entry in ENTRIES:
        words = [f"run={own.path}", f"++dataset.path={other}", *LABELS[entry]]
        settings = settings_of(*words, entry=entry)
        assert settings.dataset.source.get("path") == str(other)


FILES = "rlhf_lightning.data.sources.base.FileSource"
HUB = "rlhf_lightning.data.sources.base.HubSource"
TEXT = "rlhf_lightning.data.sources.labelled_text.LabelledTextSource"
SENTIMENT = "rlhf_lightning.evaluation.bag_of_words.sentiment_gold"
REWARD = "rlhf_lightning.rollout.scorers.text_reward_model.TextRewardModelScorer"
JOINED = "rlhf_lightning.data.sources.base.JoinedSource"
FOREIGN = {
    "a file": ("dataset.path", "FILE"),
    "held-out records": ("dataset.source.validation_path", "FILE"),
    "a folder": ("dataset.path", "FOLDER"),
    "a folder that has a hub's name": ("dataset.source", {"_target_": HUB, "name": "FOLDER"}),
    "two files of texts": (
        "dataset.source",
        {"_target_": TEXT, "positive": "FILE", "negative": "FILE"},
    ),
    "one of several sources": (
        "dataset.source",
        {"_target_": JOINED, "sources": [{"_target_": FILES, "path": "FILE"}]},
    ),
    "what gold learns from": (
        "dataset.gold",
        {
            "_target_": SENTIMENT,
            "source": {"_target_": TEXT, "positive": "FILE", "negative": "FILE"},
        },
    ),
    "a link": ("dataset.path", "LINK"),
    "from the home folder": ("dataset.path", "~/FILE"),
    "a template": ("model.chat_template", "FILE"),
    "a model": ("artifacts.base", "FOLDER"),
    "safety prompts": ("safety.prompts", "FILE"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("what", FOREIGN)
def test_no_other_file_of_the_machine_is_read_for_a_run_folder(
    own: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    private = rows(tmp_path / "home" / "private" / "train.jsonl", PRIVATE + " {}")
    (private.parent / "config.json").write_text("{}")
    (tmp_path / "link").symlink_to(private)
    monkeypatch.setenv("HOME", "/")
    key, value = FOREIGN[what]
    text = json.dumps(value).replace("FILE", str(private)).replace("FOLDER", str(private.parent))
    changed(own, key, json.loads(text.replace("LINK", str(tmp_path / "link")).replace("~//", "~/")))
    for entry in ENTRIES if what != "safety prompts" else ENTRIES[:1]:
        with pytest.raises(ConfigError, match=r"private|link") as caught:
            settings_of(f"run={own.path}", entry=entry)
        assert "++" in str(caught.value)
        assert PRIVATE not in str(caught.value)


def test_a_file_that_the_run_has_no_digest_of_is_not_opened(tmp_path: Path) -> None:
    read = rows(tmp_path / "read.jsonl", "a {}")
    assert is_unchanged([read], [content_digest(read)])
    os.mkfifo(tmp_path / "private")  # opening it would wait for ever
    assert not is_unchanged([tmp_path / "private"], [])
    assert not is_unchanged([read, tmp_path / "private"], [content_digest(read)])


@pytest.mark.thorough
def test_a_run_without_a_record_of_what_it_read_says_how_to_name_it(own: RunFolder) -> None:
    summary = json.loads(own.summary.read_text())
    assert set(summary["read"]) >= {"dataset.source.path", "artifacts.base"}
    del summary["read"]
    own.summary.write_text(json.dumps(summary))
    assert read_summary(own).read == {}
    words = [f"run={own.path}"]
    for _ in range(9):
        try:
            settings_of(*words, entry="evaluate")
            break
        except ConfigError as error:
            key, _, value = str(error).split()[0].partition("=")
            words.append(f"++{key}={value}")
    assert settings_of(*words, entry="evaluate").dataset.name == "mine"
    assert 2 < len(words) < 9


@pytest.mark.thorough
def test_a_collection_of_a_pipeline_names_what_its_training_step_will_read(tmp_path: Path) -> None:
    words = [f"experiments.{stage}=null" for stage in ("base", "reward")]
    words += [f"experiments.{stage}={stage}_smollm2_gsm8k" for stage in ("sft", "ppo")]
    data = rows(tmp_path / "it's.jsonl")
    words += [f"train:dataset.path={quoted(str(data))}", "collect=true", "collect:annotator=page"]
    steps = plan(composed(*words), tmp_path)
    step = next(step for step in steps if step.stage == "collect")
    file = step.lead.settings_file
    file.parent.mkdir()
    write_settings(file, settings_of(*step.lead.words))
    given = [word for word in step.command_line()[3:] if not word.startswith("hydra.")]
    assert settings_of(*given, entry="collect").dataset.source.get("path") == str(data)
    with pytest.raises(ConfigError, match=r"dataset\.path="):
        settings_of(*step.words, entry="collect")
