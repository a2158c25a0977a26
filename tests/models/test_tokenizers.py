from __future__ import annotations

import pytest
from transformers import GenerationConfig

from rlhf_lightning.models.tokenizers import load_tokenizer, stop_ids
from tests.tiny import EOS, PAD, tiny_tokenizer


def test_a_tokenizer_without_pad_pads_with_eos_on_the_left(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = None
    tokenizer.padding_side = "right"
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded.pad_token_id == loaded.eos_token_id == EOS
    assert loaded.padding_side == "left"


def test_a_pad_token_of_its_own_is_kept(tmp_path):
    tiny_tokenizer().save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path).pad_token_id == PAD


def test_a_tokenizer_without_eos_is_refused(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has no EOS token"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("eos", "expected"), [([7, 5], (EOS, 5, 7)), (9, (EOS, 9)), (None, (EOS,)), (EOS, (EOS,))]
)
def test_a_response_stops_at_the_tokenizers_eos_and_at_the_checkpoints_own(tmp_path, eos, expected):
    GenerationConfig(eos_token_id=eos).save_pretrained(tmp_path)
    assert stop_ids(tiny_tokenizer(), tmp_path) == expected


def test_the_stop_tokens_of_a_hub_checkpoint_are_found_without_a_folder(monkeypatch):
    asked = []

    def from_pretrained(source):
        asked.append(source)
        return GenerationConfig(eos_token_id=[7])

    monkeypatch.setattr(GenerationConfig, "from_pretrained", from_pretrained)
    assert stop_ids(tiny_tokenizer(), "organisation/model") == (EOS, 7)
    assert asked == ["organisation/model"]


def test_without_a_generation_config_only_the_tokenizers_eos_stops(tmp_path):
    assert stop_ids(tiny_tokenizer(), None) == (EOS,)
    assert stop_ids(tiny_tokenizer(), tmp_path) == (EOS,)
