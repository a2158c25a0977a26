"""Files of a run folder that someone else has written: refused in one line, or harmless."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from rlhf_lightning.app.config.compose import ConfigError
from rlhf_lightning.app.config.saved import working_folder
from rlhf_lightning.app.report import run as report
from rlhf_lightning.app.study.steps import plan
from rlhf_lightning.models.factory import load_policy
from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.resume import checkpoint_problem
from rlhf_lightning.text.tokenizers import load_tokenizer, stop_ids
from tests.builders.command_lines import settings_of
from tests.builders.runs import make_start

pytestmark = pytest.mark.timeout(60)
DEEP = "[" * 10_000 + "]" * 10_000
LESS_DEEP = "[" * 900 + "]" * 900  # json reads it, and what walks through it does not
PRIVATE = '{"iteration": 1, "prompt": "my password is swordfish", "response": ""}\n'
SUMMARY = {"stage": "sft", "status": "completed", "seed": 1}


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder(tmp_path / "run")
    made.config.parent.mkdir(parents=True)
    (made.path / "checkpoints").mkdir()
    made.config.write_text(yaml.safe_dump(settings_of("+experiment=sft", "logger=none").written))
    made.summary.write_text(json.dumps(SUMMARY))
    made.metrics.write_text("iteration,sft/loss\n1,2.0\n2,1.0\n")
    made.samples.write_text('{"iteration": 1, "prompt": "a", "response": "b"}\n')
    made.doctor.write_text("")
    return made


def put(path: Path, content: str | bytes | None, private: Path) -> None:
    """Write a file; None is a pipe, and "LINK" a link to a private file."""
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    if content is None:
        os.mkfifo(path)
    elif content == "LINK":
        path.symlink_to(private)
    elif isinstance(content, str):
        path.write_text(content)
    else:
        path.write_bytes(content)


ROW = '{{"iteration": 1, "prompt": {}}}\n'
REFUSED = [
    ("summary.json", DEEP),
    ("summary.json", b'{"stage": "\xff"}'),
    ("summary.json", "[]"),
    ("summary.json", "LINK"),
    ("metrics.csv", None),
    ("metrics.csv", "LINK"),
    ("metrics.csv", "iteration,a\nnan,1\n"),
    ("metrics.csv", "iteration," + ",".join(map(str, range(100_000))) + "\n"),
    ("samples.jsonl", None),
    ("samples.jsonl", "LINK"),
    ("distributions.jsonl", None),
    ("doctor.jsonl", None),
    (".hydra/config.yaml", "LINK"),
    ("doctor.jsonl", DEEP + "\n"),
]
HARMLESS = [
    ("samples.jsonl", ROW.format(DEEP)),
    ("samples.jsonl", ROW.format(LESS_DEEP)),
    ("samples.jsonl", ROW.format("1" + "0" * 5000)),
    ("samples.jsonl", ROW.format('"' + "x" * 2**25 + '"')),
    (
        "distributions.jsonl",
        '{"iteration": 1, "held_out": "pool", "groups": [1e9]}\n',
    ),
    ("summary.json", json.dumps(SUMMARY | {"metrics": {"val/loss": 1e308, "<script>": -1e308}})),
    ("summary.json", json.dumps(SUMMARY | {"stage": "pipeline", "about": {"stages": "../../x"}})),
    (".hydra/config.yaml", None),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "content"), REFUSED, ids=lambda value: str(value)[:30])
def test_a_report_refuses_a_file_that_it_cannot_trust(
    folder: RunFolder, tmp_path: Path, name: str, content: str | bytes | None
) -> None:
    private = tmp_path / "private"
    private.write_text(PRIVATE)
    put(folder.path / name, content, private)
    with pytest.raises((OSError, ValueError), match="run") as caught:
        report([folder.path])
    assert len(str(caught.value)) < 500
    assert not folder.report.exists()


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "content"), HARMLESS, ids=lambda value: str(value)[:30])
def test_a_report_is_written_from_odd_files(
    folder: RunFolder, tmp_path: Path, name: str, content: str | None
) -> None:
    private = tmp_path / "private"
    private.write_text(PRIVATE)
    put(folder.path / name, content, private)
    report([folder.path])
    page = folder.report.read_text()
    assert "<script>" not in page.split("</style>")[-1].split("<script", 1)[0]
    assert len(page) < 2**21
    assert "swordfish" not in page


@pytest.mark.parametrize("content", [None, "hydra: [1]", "hydra: {runtime: x}"])
def test_a_folder_that_is_told_in_an_odd_way_is_this_one(folder, tmp_path, content) -> None:
    put(folder.config.with_name("hydra.yaml"), content, tmp_path)
    assert working_folder(folder) == Path()


@pytest.mark.thorough
@pytest.mark.parametrize("content", [None, "LINK", DEEP, b"\xff"])
def test_settings_that_are_no_plain_text_are_refused_by_name(folder, tmp_path, content) -> None:
    put(folder.config, content, tmp_path / "private")
    for entry in ("evaluate", "collect"):
        with pytest.raises(ConfigError, match=r"config\.yaml"):
            settings_of(f"run={folder.path}", entry=entry)


def test_an_export_that_is_a_link_to_a_model_elsewhere_is_not_loaded(
    folder: RunFolder, tmp_path: Path
) -> None:
    (tmp_path / "model").mkdir()
    folder.export.symlink_to(tmp_path / "model")
    with pytest.raises(ConfigError, match="export"):
        settings_of(f"run={folder.path}", entry="evaluate")


@pytest.mark.parametrize("content", [None, DEEP, LESS_DEEP, "[]", '{"meta.pt": 1}', b"\xff"])
def test_odd_checksums_of_a_checkpoint_are_a_problem_of_it(folder, tmp_path, content) -> None:
    shards = folder.checkpoints / "iteration=000001.ckpt"
    put(shards / "checksums.json", content, tmp_path)
    put(shards / "meta.pt", None, tmp_path)
    assert checkpoint_problem(shards) is not None


def test_the_record_of_a_pipeline_is_read_as_data(tmp_path: Path) -> None:
    settings = settings_of("evaluate=false", "experiments.ppo=null", entry="pipeline")
    step, *_ = plan(settings, tmp_path)
    for content in (DEEP, LESS_DEEP, "[1]", '{"config_hash": 1}', '{"read": {"a": []}}', b"\xff"):
        put(step.record, content, tmp_path)
        assert step.attempts() == []
        assert not step.is_done()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_start(tmp_path_factory.mktemp("model") / "model")


def loaded(folder: Path) -> None:
    load_policy(str(folder))
    stop_ids(load_tokenizer(folder), folder)


def with_value(name: str, key: str, value: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / name
        file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))

    return change


def with_text(name: str, content: str | None) -> Callable[[Path], None]:
    return lambda folder: put(folder / name, content, folder)


MODELS = {
    "a deep config": with_text("config.json", DEEP),
    "a text as size": with_value("config.json", "hidden_size", "64"),
    "less than no rows": with_value("config.json", "vocab_size", -5),
    "a list as config": with_text("config.json", "[]"),
    "a list as model type": with_value("config.json", "model_type", ["a"]),
    "deep settings of generation": with_text("generation_config.json", DEEP),
    "a list of settings of generation": with_text("generation_config.json", "[]"),
    "a text as end": with_value("generation_config.json", "eos_token_id", "x"),
    "an end beyond all": with_value("generation_config.json", "eos_token_id", 10**30),
    "a deep tokenizer": with_text("tokenizer.json", DEEP),
    "a list as tokenizer": with_text("tokenizer.json", "[]"),
    "deep settings of a tokenizer": with_text("tokenizer_config.json", DEEP),
    "a list of settings of a tokenizer": with_text("tokenizer_config.json", "[]"),
    "a deep index": with_text("model.safetensors.index.json", DEEP),
    "a pipe as index": with_text("model.safetensors.index.json", None),
    "a pipe as weights": with_text("model.safetensors", None),
    "a deep manifest": with_text("manifest.json", DEEP),
}


@pytest.mark.parametrize("what", MODELS)
def test_a_model_s_folder_with_odd_files_is_refused_by_name(model: Path, tmp_path, what) -> None:
    odd = shutil.copytree(model, tmp_path / "odd")
    MODELS[what](odd)
    with pytest.raises((ValueError, OSError, RuntimeError), match="odd") as caught:
        loaded(odd)
    assert not isinstance(caught.value, RecursionError)
