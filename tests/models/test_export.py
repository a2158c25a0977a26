"""What plain transformers makes of an exported folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    pipeline,
)

from rlhf_lightning.distributed.collectives import full_state
from rlhf_lightning.models.factory import load_scalar_model
from rlhf_lightning.models.forward import sequence_scores
from rlhf_lightning.modules.export import save_hf_model
from rlhf_lightning.text.tokenizers import ADDED, classifier_tokenizer, load_tokenizer, stop_ids
from tests.builders.mirror import on_mirror
from tests.builders.models import (
    EOS,
    MODEL_TYPES,
    VOCABULARY,
    tiny_policy,
    tiny_scalar_model,
    tiny_tokenizer,
)
from tests.builders.tokenizers import CHATML, build_tokenizer

TEXTS = ["w5 w6 w7 w8 w9 <eos>", "w10 <eos>", "w11 w12 w5 <eos>", "w30 w31 w32 w33 w34 w35 <eos>"]
CHAT = "{% for m in messages %}{{ m.content }} {% endfor %}"


def export_reward(model: Any, tokenizer: Any, folder: Path) -> None:
    save_hf_model(model, tokenizer, folder, model.state_dict(), stop_ids=[EOS])


def our_scores(model: Any, tokenizer: Any) -> torch.Tensor:
    batch = tokenizer(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        return sequence_scores(model, batch["input_ids"], batch["attention_mask"].bool())


def plain_scores(folder: Path) -> tuple[torch.Tensor, Any, Any]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    batch = tokenizer(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        scores = model(**batch).logits.squeeze(-1)
        assert (batch["attention_mask"] == 0).any(), "nothing is padded: the test shows nothing"
        # The score is the one of the state at EOS, whatever stands around it.
        for row, ids in enumerate(batch["input_ids"]):
            until_eos = ids[None, : int((ids == EOS).nonzero()[0]) + 1]
            assert model(until_eos).logits.item() == pytest.approx(scores[row].item(), abs=1e-5)
            # Without the EOS it is another number, so it is not read one token early.
            before = model(until_eos[:, :-1]).logits.item()
            assert abs(before - scores[row].item()) > 1e-3
    return scores, tokenizer, model


@pytest.mark.parametrize("pad_is_eos", [True, False])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_plain_transformers_reads_a_padded_batch_at_eos_as_we_do(model_type, pad_is_eos, tmp_path):
    model = tiny_scalar_model(model_type, bias=0.3)
    model.normalize(0.4, 2.5)
    tokenizer = tiny_tokenizer(pad_is_eos=pad_is_eos)
    export_reward(model, tokenizer, tmp_path)
    expected = our_scores(model, tokenizer)
    scores, exported, plain = plain_scores(tmp_path)
    assert exported.pad_token == (ADDED if pad_is_eos else "<pad>")
    assert plain.config.pad_token_id == exported.pad_token_id != exported.eos_token_id
    offset = json.loads((tmp_path / "config.json").read_text())["reward_offset"]
    assert offset == pytest.approx(model.head.bias.item())
    assert abs(offset) > 0.01
    torch.testing.assert_close(scores, expected - offset, rtol=0, atol=1e-5)
    torch.testing.assert_close(scores.diff(), expected.diff(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_our_own_export_loads_again_and_takes_the_policys_ids(model_type, tmp_path):
    model, tokenizer = tiny_scalar_model(model_type), tiny_tokenizer(pad_is_eos=True)
    export_reward(model, tokenizer, tmp_path / "a")
    again = load_scalar_model(tmp_path / "a")
    assert again.trunk.get_input_embeddings().weight.shape[0] == VOCABULARY + 1
    expected = our_scores(model, tokenizer)
    assert torch.equal(our_scores(again, tokenizer), expected)
    # A second export with the policy's tokenizer finds the row that the first one added.
    export_reward(again, tokenizer, tmp_path / "b")
    assert load_scalar_model(tmp_path / "b").trunk.config.vocab_size == VOCABULARY + 1
    # And one with the tokenizer of the export pads with the token it already has.
    export_reward(again, load_tokenizer(tmp_path / "a"), tmp_path / "c")
    for name in ("b", "c"):
        assert torch.equal(our_scores(load_scalar_model(tmp_path / name), tokenizer), expected)
        assert AutoTokenizer.from_pretrained(tmp_path / name).get_vocab()[ADDED] == VOCABULARY


def test_a_pipeline_gives_the_score_without_a_sigmoid_and_without_the_offset(tmp_path):
    model, tokenizer = tiny_scalar_model("llama", bias=0.3), tiny_tokenizer(pad_is_eos=True)
    model.normalize(0.4, 0.01)
    export_reward(model, tokenizer, tmp_path)
    classify = pipeline("text-classification", str(tmp_path))
    found = [each["score"] for each in classify(TEXTS, batch_size=4)]
    expected = our_scores(model, tokenizer)
    assert expected.abs().max() > 1, "a probability is within 0 and 1"
    offset = classify.model.config.reward_offset
    torch.testing.assert_close(torch.tensor(found) + offset, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_an_exported_policy_brings_its_logits_template_and_stop_ids(model_type, tmp_path):
    policy, tokenizer = tiny_policy(model_type), tiny_tokenizer(pad_is_eos=True)
    tokenizer.chat_template = CHAT
    save_hf_model(policy, tokenizer, tmp_path, policy.state_dict(), stop_ids=[7, EOS])
    ids = torch.randint(2, VOCABULARY, (3, 9))
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(tmp_path)(ids).logits
        expected = policy.model(ids).logits
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
    assert GenerationConfig.from_pretrained(tmp_path).eos_token_id == [EOS, 7]
    exported = load_tokenizer(tmp_path)
    assert stop_ids(exported, tmp_path) == (EOS, 7)
    assert exported.chat_template == CHAT
    assert not list(tmp_path.glob("*.bin"))


def exported_from(device: str, folder: Path) -> None:
    policy = tiny_policy("llama", tie_word_embeddings=True).to(device)
    save_hf_model(policy, tiny_tokenizer(), folder, full_state(policy), stop_ids=[EOS])


def test_tied_weights_that_lay_on_a_device_are_exported_once(tmp_path):
    exported_from("cpu", tmp_path / "cpu")
    on_mirror(exported_from, "mirror", tmp_path / "mirror")
    here, there = (load_file(tmp_path / d / "model.safetensors") for d in ("cpu", "mirror"))
    assert there.keys() == here.keys()
    assert "lm_head.weight" not in here


CHAT_TEMPLATES = {
    "chatml": CHATML,
    "a loop with white space control": (
        "{%- for m in messages %}\n{{- '<|im_start|>' + m.role + '\n' + m.content | trim }}\n"
        "{{- '<|im_end|>\n' }}\n{%- endfor %}\n{%- if add_generation_prompt %}\n"
        "{{- '<|im_start|>assistant\n' }}\n{%- endif %}\n"
    ),
}


@pytest.mark.parametrize("name", CHAT_TEMPLATES)
def test_a_conversation_ends_at_eos_in_the_classifiers_template(name):
    tokenizer = build_tokenizer(template=CHAT_TEMPLATES[name])
    exported = classifier_tokenizer(tokenizer)
    messages = [{"role": "user", "content": "hi  "}, {"role": "assistant", "content": "yes \n"}]
    before = tokenizer.apply_chat_template(messages, tokenize=False)
    after = exported.apply_chat_template(messages, tokenize=False)
    assert after == before.rstrip()
    ids = exported.apply_chat_template(messages, return_dict=True)["input_ids"]
    assert ids[-1] == exported.eos_token_id
    # What an answer follows keeps its newline, and so does a conversation that stops elsewhere.
    for kept in ({"add_generation_prompt": True}, {"continue_final_message": True}):
        ours = exported.apply_chat_template(messages, tokenize=False, **kept)
        assert ours == tokenizer.apply_chat_template(messages, tokenize=False, **kept)
    again = classifier_tokenizer(exported)
    assert again.chat_template == exported.chat_template
