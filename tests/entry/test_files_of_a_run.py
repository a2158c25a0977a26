"""`run=FOLDER` reads the files and models of the run."""

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


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, start: Path) -> RunFolder:
    folder = tmp_path_factory.mktemp("own")
    model = shutil.copytree(start, folder / "model")
    data = folder / "data.jsonl"
    rows = [{"prompt": f"what is {n} ?", "completion": "sum"} for n in range(40)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
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
