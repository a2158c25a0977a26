"""An adapter's folder is no model: it is named, and never applied unasked."""

from __future__ import annotations

import logging
import shutil

import pytest
import torch
from peft import LoraConfig, get_peft_model

from rlhf_lightning.models.factory import load_policy
from rlhf_lightning.text.tokenizers import load_tokenizer
from tests.builders.models import tiny_policy, tiny_tokenizer


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    tiny_policy("llama").model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


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
    assert "holds an adapter too, which is not applied" in caplog.text


def test_an_adapters_folder_is_named_with_its_base_and_the_way_to_merge_it(model, adapter):
    for load in (load_policy, load_tokenizer):
        with pytest.raises(ValueError, match=r"is an adapter on .*merge_and_unload"):
            load(adapter)
