"""A run folder from someone else is data: its settings name public classes of ours alone."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhf_lightning.app.config.compose import ConfigError
from rlhf_lightning.reports.page import saved_config
from rlhf_lightning.runs.folder import RunFolder
from tests.builders.command_lines import settings_of

Config = dict[str, Any]
BASE = "rlhf_lightning.rollout.scorers.base"
HTTP = "rlhf_lightning.rollout.scorers.http.HttpScorer"
LOAD = {"_target_": f"{BASE}.load_function", "path": "EVIL:f"}
WRITE = {"_target_": "rlhf_lightning.preferences.records.write_rows", "path": "PROOF", "rows": []}
SERVER = "rlhf_lightning.rollout.generators.vllm.VllmGenerator"
LOADER = {
    "_target_": "rlhf_lightning.models.factory.load_scalar_model",
    "_partial_": True,
    "source": "x",
    "trust_remote_code": True,
}
NODES = {
    "scorer": [
        LOAD,
        {"_target_": f"{BASE}.FunctionScorer", "function": "EVIL:f"},
        {"_target_": f"{BASE}.RewardModelScorer", "load": LOADER},
        {"_target_": HTTP, "url": "http://h/s"},
        {"_target_": f"{BASE}.WeightedScorer", "scorers": {"a": {"_target_": HTTP, "url": "h"}}},
        "${oc.create:{_target_: os.system}}",
    ],
    "safety.is_refusal": [{"_target_": "builtins.eval", "_partial_": True}],
    "evaluation.gold": [
        {**LOAD, "_partial_": True},
        {"_target_": "os.system", "_partial_": True},
    ],
    "dataset.source": [
        {"_target_": "rlhf_lightning.data.sources.base.JoinedSource", "sources": [WRITE]},
    ],
    "rollout": [
        {"_target_": SERVER, "_partial_": True, "python": "/bin/sh"},
        {"_target_": SERVER, "_partial_": True, "python": "", "replicas": [{"BASH_ENV": "EVIL"}]},
    ],
    "model.tokenizer": [
        {
            "_target_": "rlhf_lightning.text.tokenizers.load_tokenizer",
            "source": "x",
            "trust_remote_code": True,
        },
    ],
    "model.trust_remote_code": [True],
    "module": [{**LOAD, "_partial_": True}],
    "optimizer": [{**WRITE, "_partial_": True}],
    "callbacks.extra": [{"a": WRITE}],
    "doctor.second_scorer": [LOAD],
    "stage": ["os.system"],
}
CASES = [(key, value) for key, values in NODES.items() for value in values]


@pytest.fixture(scope="module")
def saved() -> Config:
    return settings_of("+experiment=ppo", "logger=none").written


def put(config: Config, key: str, value: Any) -> Config:
    changed = copy.deepcopy(config)
    *parents, last = key.split(".")
    node = changed
    for parent in parents:
        node = node[parent]
    node[last] = value
    return changed


def folder_of(path: Path, text: str) -> RunFolder:
    folder = RunFolder(path / "run")
    folder.config.parent.mkdir(parents=True)
    folder.config.write_text(text)
    return folder


@pytest.mark.thorough
@pytest.mark.parametrize(("key", "value"), CASES, ids=lambda value: str(value)[-60:])
def test_a_saved_node_that_could_do_anything_is_refused_and_does_nothing(
    saved: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: Any
) -> None:
    proof, evil = tmp_path / "PROOF", tmp_path / "evil.py"
    evil.write_text(f"open({str(proof)!r}, 'w').close()\ndef f(**_): return []\n")
    text = yaml.safe_dump(put(saved, key, value), sort_keys=False)
    folder = folder_of(tmp_path, text.replace("EVIL", str(evil)).replace("PROOF", str(proof)))
    with pytest.raises(ConfigError) as caught:
        settings_of(f"run={folder.path}", entry="evaluate")
    assert not proof.exists()
    assert "\n" not in str(caught.value)


def test_objects_of_yaml_are_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "a: !!python/object/apply:os.system ['true']")
    with pytest.raises(ConfigError):
        settings_of(f"run={folder.path}", entry="evaluate")
    assert saved_config(folder) == {}  # as a report reads it


@pytest.mark.parametrize("text", ["${oc.env:ADDRESS}", r"\${oc.env:ADDRESS}"])
def test_a_configuration_that_reads_the_environment_is_refused(tmp_path, monkeypatch, text):
    monkeypatch.setenv("ADDRESS", "postgres://user:secret@host")
    trained = settings_of("+experiment=ppo", "logger=none").written
    gates = {"x": {"metric": f"val/{text}", "at_least": 0.1}}
    folder = folder_of(tmp_path, yaml.safe_dump(trained | {"gates": gates}))
    with pytest.raises(ConfigError, match="write its value") as caught:
        settings_of(f"run={folder.path}", entry="evaluate")
    assert "secret" not in str(caught.value)


def test_what_a_run_read_from_the_environment_is_saved_as_its_value(working_folder, monkeypatch):
    from rlhf_lightning.app.config.saved import write_settings

    monkeypatch.setenv("MODELS", "my_models")
    words = ["+experiment=ppo", "artifacts.sft=${oc.env:MODELS}/sft"]
    trained = settings_of(*words)
    folder = folder_of(working_folder, "")
    write_settings(folder.config, trained)
    monkeypatch.delenv("MODELS")
    assert settings_of(f"run={folder.path}", entry="evaluate").baseline == "my_models/sft"
    monkeypatch.setenv("SLURM_TMPDIR", "/fast")  # differs between jobs, so it is saved as written
    write_settings(folder.config, settings_of(*words[:1], "artifacts.sft=${oc.env:SLURM_TMPDIR}/s"))
    assert settings_of(f"run={folder.path}", entry="evaluate").baseline == "/fast/s"
