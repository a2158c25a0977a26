"""A model's folder: nothing outside of it is read, copied or sent, and an adapter is no model."""

from __future__ import annotations

import json
import logging
import os
import shutil

import pytest
import torch
from peft import LoraConfig, get_peft_model

from rlhf_lightning.app import export
from rlhf_lightning.app.config.commands import ExportSettings
from rlhf_lightning.app.config.compose import ConfigError
from rlhf_lightning.models.adapter_files import read_adapter
from rlhf_lightning.models.classifiers import load_classifier
from rlhf_lightning.models.factory import load_policy, load_scalar_model
from rlhf_lightning.runs.hub import HubError, push_folder
from rlhf_lightning.runs.manifest import publish_artifact
from rlhf_lightning.runs.model_folder import of_adapter
from rlhf_lightning.text.tokenizers import load_tokenizer
from tests.builders.models import tiny_policy, tiny_tokenizer

LOADERS = [load_policy, load_scalar_model, load_classifier, load_tokenizer]


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    tiny_policy("llama").model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def secret_link(folder, how):
    outside = folder.parent / "outside"
    outside.mkdir()
    (outside / "secret.json").write_text("{}")
    if how == "file":
        (folder / "notes.json").symlink_to(outside / "secret.json")
    elif how == "relative":
        (folder / "notes.json").symlink_to("../outside/secret.json")
    elif how == "chain":
        (folder / "first").symlink_to("second")
        (folder / "second").symlink_to(outside / "secret.json")
    elif how == "folder":
        (folder / "more").symlink_to(outside)
    elif how == "in a folder":
        (folder / "adapter").mkdir()
        (folder / "adapter/notes.json").symlink_to(outside / "secret.json")
    elif how == "weights":
        shutil.move(folder / "model.safetensors", outside)
        (folder / "model.safetensors").symlink_to(outside / "model.safetensors")
    elif how == "dangling":
        (folder / "notes.json").symlink_to(outside / "later.json")


WAYS = ("file", "relative", "chain", "folder", "in a folder", "weights", "dangling")


@pytest.mark.parametrize("how", WAYS)
def test_a_link_that_leaves_the_folder_is_not_followed(how, model, tmp_path):
    secret_link(model, how)
    for load in LOADERS:
        with pytest.raises(ValueError, match=r"is a link to .*outside"):
            load(model)
    with pytest.raises(HubError, match=r"nothing was pushed to me/it: .* is a link to"):
        push_folder(model, "me/it")
    with pytest.raises(ValueError, match="is a link to"):
        publish_artifact(model, tmp_path / "artifact", stage="sft", run="r")
    assert not (tmp_path / "artifact").exists()


@pytest.mark.parametrize("shard", ["../outside.safetensors", "/outside.safetensors", "a/../../b"])
def test_an_index_that_names_a_file_elsewhere_is_refused(shard, model):
    (model / "model.safetensors").rename(model.parent / "outside.safetensors")
    absolute = str(model.parent) + shard if shard.startswith("/") else shard
    index = {"metadata": {}, "weight_map": {"lm_head.weight": absolute}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"index\.json names the file .*outside"):
        load_policy(model)


@pytest.mark.parametrize("text", ["[]", "{", '{"weight_map": 3}'])
def test_a_damaged_index_is_named(text, model):
    (model / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match=r"index\.json is damaged"):
        load_policy(model)


def test_links_within_the_folder_to_it_and_in_the_hubs_cache_are_read(model, tmp_path):
    (model / "again.safetensors.txt").symlink_to("model.safetensors")
    (tmp_path / "name").symlink_to(model)
    load_policy(tmp_path / "name")
    snapshot = tmp_path / "models--me--it/snapshots/0123"
    blobs = tmp_path / "models--me--it/blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(p for p in sorted(model.iterdir()) if not p.is_symlink()):
        shutil.copy(file, blobs / str(number))
        (snapshot / file.name).symlink_to(os.path.relpath(blobs / str(number), snapshot))
    load_policy(snapshot)
    load_tokenizer(snapshot)


@pytest.fixture
def adapter(model, tmp_path):
    adapted = get_peft_model(
        load_policy(model).model,
        LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False),
    )
    adapted.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def test_an_adapter_in_a_models_folder_is_not_applied_and_is_named(model, adapter, caplog):
    before = load_policy(model).state_dict()
    for file in adapter.glob("adapter_*"):
        shutil.copy(file, model)
    with caplog.at_level(logging.WARNING):
        after = load_policy(model).state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert "adapter_config.json" in caplog.text
    assert "not applied" in caplog.text


def test_an_adapters_folder_is_named_with_its_base_and_the_way_to_merge_it(model, adapter):
    for load in (load_policy, load_tokenizer):
        with pytest.raises(ValueError, match=r"is an adapter on .*merge_and_unload"):
            load(adapter)


def test_an_adapter_of_a_run_is_named_with_its_merged_model_where_that_stands(model, adapter):
    (adapter / "rlhf_lightning.json").write_text("{}")
    own = model / "adapter"
    shutil.copytree(adapter, own)
    assert "merge_and_unload" in of_adapter(own)  # it lies beside its base
    (model / "training_config.yaml").touch()
    assert f"give {model}, where it is merged" in of_adapter(own)


def test_a_reward_adapter_is_named_with_what_merges_it(adapter):
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"task_type": "SEQ_CLS"}))
    assert "ForSequenceClassification" in of_adapter(adapter)


def test_an_adapter_that_is_to_be_exported_is_named_as_one(adapter):
    with pytest.raises(ConfigError, match=r"is an adapter on .*merge_and_unload"):
        export.run(ExportSettings(run=adapter))


def test_an_adapter_with_a_link_that_leaves_it_is_not_read(adapter, tmp_path):
    shutil.move(adapter / "adapter_model.safetensors", tmp_path / "other.safetensors")
    (adapter / "adapter_model.safetensors").symlink_to(tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="is a link to"):
        read_adapter(adapter)
