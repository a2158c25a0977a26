"""`run=FOLDER` reads the files and models of the run, unless the command line names others."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from rlhf_lightning.app.collect import run as collect
from rlhf_lightning.app.config.saved import write_settings
from rlhf_lightning.app.evaluate import run as evaluate
from rlhf_lightning.app.train import run as train
from rlhf_lightning.runs.folder import RunFolder
from tests.builders.command_lines import SMALL, settings_of

# The default annotators know the built-in world alone.
LABELS = {"evaluate": [], "collect": ["annotator=page"]}


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


def test_ones_own_run_is_evaluated_and_collected_from_without_a_word_more(
    trained: RunFolder, tmp_path: Path
) -> None:
    words = [f"run={trained.path}", "evaluation.num_prompts=4", "evaluation.max_new_tokens=4"]
    summary = evaluate(settings_of(*words, entry="evaluate"), RunFolder(tmp_path / "e"), words)
    assert summary.status == "completed"
    words = [f"run={trained.path}", "candidates.num_prompts=4", "candidates.max_new_tokens=4"]
    words += ["annotator=page", "artifacts.publish=null", "lab.keep_unfinished=true"]
    settings = settings_of(*words, entry="collect")
    with pytest.raises(Exception, match="label"):  # of people
        collect(settings, RunFolder(tmp_path / "c"), words)
    assert (tmp_path / "c" / "summary.json").exists()


def test_a_file_that_is_named_again_is_the_one_that_is_read(
    trained: RunFolder, tmp_path: Path
) -> None:
    other = rows(tmp_path / "other.jsonl", "what is {} to you ?")
    for entry, own in LABELS.items():
        words = [f"run={trained.path}", f"++dataset.path={other}", *own]
        settings = settings_of(*words, entry=entry)
        assert settings.dataset.source.get("path") == str(other)
