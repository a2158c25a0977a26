"""Which version is loaded, whose code runs, and what is said of a checkpoint that cannot be."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from rlhf_lightning.models.factory import load_policy, load_scalar_model
from rlhf_lightning.models.loading import not_replaced
from rlhf_lightning.models.ppo_models import ppo_models
from rlhf_lightning.runs.manifest import ManifestError, write_manifest
from rlhf_lightning.text.tokenizers import load_tokenizer
from tests.builders.models import tiny_policy, tiny_tokenizer

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
Path(__file__).with_name("executed").touch()
Path({marker!r}).touch()
class MyConfig(LlamaConfig):
    model_type = "mine"
class MyModel(LlamaForCausalLM):
    config_class = MyConfig
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_policy("llama").model.save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def change_config(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.fixture
def with_code(folder: Path, tmp_path: Path) -> Path:
    (folder / "mine.py").write_text(CODE.format(marker=str(tmp_path / "executed")))
    auto_map = {"AutoConfig": "mine.MyConfig", "AutoModelForCausalLM": "mine.MyModel"}
    change_config(folder, model_type="mine", auto_map=auto_map)
    return folder


def test_code_beside_the_weights_does_not_run_unless_it_is_asked_for(
    with_code, tmp_path, monkeypatch
):
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    with pytest.raises(ValueError, match=r"cannot load .*trust_remote_code"):
        load_policy(with_code)
    assert not (tmp_path / "executed").exists()
    policy = load_policy(with_code, trust_remote_code=True)
    assert (tmp_path / "executed").exists()
    assert type(policy.model).__name__ == "MyModel"


@pytest.mark.parametrize("revision", [None, "main", "v1.0", COMMIT[:7], COMMIT.upper()])
def test_code_of_a_hub_name_needs_a_commit_before_anything_is_asked_of_the_hub(revision):
    for load in (load_policy, load_tokenizer, load_scalar_model):
        with pytest.raises(ValueError, match=r"can change.*model\.revision=COMMIT"):
            load("org/name", revision=revision, trust_remote_code=True)
    with pytest.raises(ValueError, match=f", not {revision}$"):
        ppo_models("org/name", None, value_head="zero", revision=revision, trust_remote_code=True)


def test_code_of_another_repository_is_refused_because_nothing_pins_it(with_code):
    change_config(with_code, auto_map={"AutoModelForCausalLM": "other/repo--mine.MyModel"})
    with pytest.raises(ValueError, match=r"takes the code of AutoModelForCausalLM from other/repo"):
        load_policy(with_code, trust_remote_code=True)


def damage(folder: Path, how: str) -> None:
    weights = folder / "model.safetensors"
    if how == "half":
        weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    elif how == "pickle":
        weights.unlink()
        torch.save(tiny_policy("llama").model.state_dict(), folder / "pytorch_model.bin")
    elif how == "none":
        weights.unlink()
    elif how == "type":
        change_config(folder, model_type="no_such_type")
    elif how == "shape":
        change_config(folder, hidden_size=64)
    elif how == "nan":
        policy = tiny_policy("llama")
        next(policy.parameters()).data[3:5] = torch.nan
        policy.model.save_pretrained(folder)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("half", "cannot load {folder}: "),
        ("pickle", "cannot load {folder}: "),
        ("none", "cannot load {folder}: "),
        ("type", "cannot load {folder}: .*no_such_type"),
        ("shape", "cannot load {folder}: "),
        ("nan", "LlamaForCausalLM of {folder} returns non-finite numbers"),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_checkpoint_that_is_damaged_is_named_in_one_line(folder, how, message):
    damage(folder, how)
    with pytest.raises(ValueError, match=message.format(folder=folder)) as caught:
        load_policy(folder)
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 600
    with pytest.raises(ValueError, match=str(folder)):
        load_scalar_model(folder, head="zero")


def test_a_name_that_is_nowhere_is_named(tmp_path):
    for load in (load_policy, load_tokenizer):
        with pytest.raises(ValueError, match=r"cannot load no/where: .*Wanted is a folder or hub"):
            load("no/where")
    shutil.rmtree(tmp_path)
    (tmp_path / "empty").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"cannot load .*empty"):
        load_tokenizer(tmp_path / "empty")


def test_a_model_that_another_replaces_while_it_is_read_is_refused(folder):
    write_manifest(folder, stage="sft", run="first")
    with not_replaced(folder):
        pass
    with pytest.raises(ManifestError, match="published anew"), not_replaced(folder):
        write_manifest(folder, stage="sft", run="second")
