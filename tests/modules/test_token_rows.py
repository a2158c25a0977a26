"""Tokens without an embedding, or with one that nobody has trained, are named before training."""

from __future__ import annotations

import logging

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlhf_lightning.data.datamodules import DemonstrationDataModule
from rlhf_lightning.modules.checks import check_token_rows
from rlhf_lightning.modules.sft import SFTModule
from rlhf_lightning.text.tokenizers import load_tokenizer
from tests.builders.models import EOS, tiny_policy, tiny_tokenizer
from tests.builders.stages import trainer


def saved(folder, *, tokens=(), pad=None, rows=None):
    model = tiny_policy("llama", **({} if rows is None else {"vocab_size": rows})).model
    model.save_pretrained(folder)
    tokenizer = tiny_tokenizer(pad_is_eos=pad is None)
    tokenizer.add_tokens(list(tokens))
    if pad is not None:
        tokenizer.add_special_tokens({"pad_token": pad})
    tokenizer.save_pretrained(folder)
    return folder


def test_eos_takes_the_place_of_a_pad_token_without_an_embedding(tmp_path):
    assert load_tokenizer(saved(tmp_path, pad="<new pad>")).pad_token_id == EOS


def test_an_eos_without_an_embedding_is_refused(tmp_path):
    saved(tmp_path)
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "<end>"})
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r"EOS .*has id 48.*48 rows.*resize_token_embeddings\(49\)"
    ):
        load_tokenizer(tmp_path)


def fit_on(folder, text):
    module = SFTModule.from_pretrained(folder)
    rows = [{"prompt": f"w{n} w6", "completion": text} for n in range(5, 15)]
    data = DemonstrationDataModule(
        rows, module.tokenizer, batch_size=4, num_iterations=1, max_length=40
    )
    trainer(max_steps=1).fit(module, data)


@pytest.mark.filterwarnings("ignore:.*val_dataloader.*")
def test_rows_that_hold_a_token_without_an_embedding_are_refused_by_its_name(tmp_path):
    folder = saved(tmp_path, tokens=["<tool>"])
    fit_on(folder, "w7 w8")
    with pytest.raises(ValueError, match=r"'<tool>' \(id 48.*resize_token_embeddings\(49\)"):
        fit_on(folder, "w7 <tool>")


@pytest.mark.parametrize("how", ["tiny", "zero", "equal"])
def test_untrained_rows_of_added_tokens_are_named_where_the_data_hold_them(how, tmp_path, caplog):
    folder = saved(tmp_path, tokens=["<a>", "<b>", "<c>"], rows=51)
    tokenizer = load_tokenizer(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    used = range(2, 50)  # not <c>
    with torch.no_grad():
        rows = model.get_input_embeddings().weight
        with caplog.at_level(logging.WARNING):
            check_token_rows(model, tokenizer, used)
        assert not caplog.records
        rows[48:] = {"tiny": 1e-17, "zero": 0.0, "equal": rows[:48].mean(0)}[how]
    with caplog.at_level(logging.WARNING):
        check_token_rows(model, tokenizer, used)
    assert "'<a>', '<b>'" in caplog.text
    assert "<c>" not in caplog.text
