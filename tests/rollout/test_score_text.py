"""Reward models of other makers say of text what they say under plain transformers."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from transformers import AutoTokenizer

from rlhf_lightning.models.factory import load_scalar_model
from rlhf_lightning.modules.export import save_hf_model
from rlhf_lightning.text.thoughts import _tell
from rlhf_lightning.text.tokenizers import load_tokenizer
from tests.rollout.reward_models import (
    DECODERS,
    ENCODERS,
    built,
    byte_tokenizer,
    close,
    plain_call,
    plain_logits,
    plain_model,
    save_reward_model,
    scored,
    text_answers,
    word_tokenizer,
)

PROMPTS = ["why?", "tell me more about it. ", "w"]
COMPLETIONS = [" because.", "no", " the third answer is longer than the others"]
WORDS = ["w1 w2 w3 w4 w5 w6 w7 w8 w9 ", "w3 ", "w7 w9 "]
ANSWERS = ["w5 w6", "w2", "w8 w1 w8 w1 w8 w1"]
EOS = "<|im_end|>"


def ids_of(folder, text, **options):
    return AutoTokenizer.from_pretrained(folder)(text, **options)["input_ids"]


@pytest.mark.parametrize("model_type", DECODERS)
def test_a_decoder_scores_prompt_answer_and_eos_as_transformers_does(model_type, tmp_path):
    folder = save_reward_model(tmp_path, model_type)
    texts = [p + c + EOS for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]
    answers = text_answers(PROMPTS, COMPLETIONS)
    got = scored(folder, answers, micro_batch_size=2).total
    assert got.dtype == torch.float32
    close(got, torch.cat([plain_logits(folder, ids_of(folder, text)) for text in texts]))
    close(got, plain_call(folder, texts, padding_side="right")[:, 0])
    assert got.std() > 0.05, "the texts must matter"


@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
def test_a_decoder_whose_pad_token_is_eos_is_read_at_eos(model_type, tmp_path, caplog):
    folder = save_reward_model(tmp_path, model_type, tokenizer=byte_tokenizer(pad=EOS))
    with caplog.at_level(logging.WARNING):
        got = scored(folder, text_answers(PROMPTS, COMPLETIONS)).total
    assert "its score is read at EOS" in caplog.text
    assert "scorer.ending=none" in caplog.text
    for row, (prompt, completion) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True)):
        ids = ids_of(folder, prompt + completion + EOS)
        model = plain_model(folder)
        # What transformers reads for itself: the token before EOS.
        overlooked = model(input_ids=torch.tensor([ids])).logits[0, 0]
        overlooked = overlooked.detach()
        assert abs(float(overlooked - got[row])) > 1e-3
        close(overlooked, plain_logits(folder, ids[:-1])[0])
        model.config.pad_token_id = ids_of(folder, "<pad>", add_special_tokens=False)[0]
        close(model(input_ids=torch.tensor([ids])).logits[0, 0], got[row])
    as_transformers = scored(folder, text_answers(PROMPTS, COMPLETIONS), ending="none").total
    texts = [p + c + EOS for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]
    close(as_transformers, plain_call(folder, texts, padding_side="right")[:, 0])


def test_a_decoder_without_a_pad_token_scores_batches_too(tmp_path):
    folder = save_reward_model(tmp_path, "gpt2", pad_token_id=None)
    got = scored(folder, text_answers(PROMPTS, COMPLETIONS)).total
    for row, (prompt, completion) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True)):
        close(plain_logits(folder, ids_of(folder, prompt + completion + EOS))[0], got[row])


@pytest.mark.parametrize(
    ("model_type", "micro_batch_size"), zip(ENCODERS, (None, 1) * 2, strict=True)
)
def test_an_encoder_scores_a_text_as_a_plain_padded_call_does(
    model_type, micro_batch_size, tmp_path
):
    folder = save_reward_model(tmp_path, model_type)
    answers = text_answers(WORDS, ANSWERS)
    got = scored(folder, answers, micro_batch_size=micro_batch_size).total
    texts = [p + c for p, c in zip(WORDS, ANSWERS, strict=True)]
    close(got, plain_call(folder, texts)[:, 0])
    close(got, torch.cat([plain_logits(folder, ids_of(folder, text)) for text in texts]))
    assert got.std() > 0.05


@pytest.mark.parametrize("model_type", ["bert", "deberta-v2"])
def test_a_pair_classifier_gets_question_and_answer_as_a_pair(model_type, tmp_path):
    folder = save_reward_model(tmp_path, model_type)
    got = scored(folder, text_answers(WORDS, ANSWERS), input_format="pair").total
    close(got, plain_call(folder, WORDS, ANSWERS)[:, 0])
    as_one = scored(folder, text_answers(WORDS, ANSWERS)).total
    assert (got - as_one).abs().max() > 1e-2
    if model_type == "bert":  # token types tell the answer from the question
        without = plain_call(folder, WORDS, ANSWERS, return_token_type_ids=False)[:, 0]
        assert (got - without).abs().max() > 1e-2


def test_a_classifier_of_completions_does_not_see_the_prompt(tmp_path):
    folder = save_reward_model(tmp_path, "distilbert")
    got = scored(folder, text_answers(WORDS, ANSWERS), input_format="completion").total
    close(got, plain_call(folder, ANSWERS)[:, 0])


def test_an_answer_that_did_not_finish_gets_no_eos(tmp_path):
    for adds_eos in (False, True):  # some tokenizers end every text with it
        folder = save_reward_model(
            tmp_path / str(adds_eos), "llama", tokenizer=byte_tokenizer(adds_eos=adds_eos)
        )
        answers = text_answers(["why?"] * 2, [" so"] * 2, finished=[True, False])
        finished, cut = scored(folder, answers).total
        for score, text in ((finished, f"<s>why? so{EOS}"), (cut, "<s>why? so")):
            close(score, plain_logits(folder, ids_of(folder, text, add_special_tokens=False))[0])
        assert abs(float(finished - cut)) > 1e-3


def test_a_response_is_scored_behind_its_thoughts_unless_they_are_kept(tmp_path, caplog):
    folder = save_reward_model(tmp_path, "llama")
    _tell.cache_clear()
    prompts = ["why?", "why?<think>\n", "why?"]
    answers = text_answers(prompts, ["<think>hm</think>\n so", "hm</think> so", "<think>hm"])
    plain = text_answers(["why?"] * 3, ["so", "so", ""])
    assert torch.equal(scored(folder, answers).total, scored(folder, plain).total)
    assert "scorer.thoughts=keep" in caplog.text
    kept = scored(folder, answers, thoughts="keep").total
    assert (kept - scored(folder, plain).total).abs().min() > 1e-3


LABELS = {"id2label": {0: "bad", 1: "good"}, "label2id": {"bad": 0, "good": 1}}


@pytest.mark.parametrize("label", ["good", 1])
def test_of_two_labels_the_log_odds_of_the_named_one_are_the_reward(label, tmp_path):
    folder = save_reward_model(tmp_path, "bert", **TWO)
    answers = text_answers(WORDS, ANSWERS)
    logits = plain_call(folder, [p + c for p, c in zip(WORDS, ANSWERS, strict=True)])
    close(scored(folder, answers, label=label).total, logits[:, 1] - logits[:, 0])
    close(scored(folder, answers, label=label, output="logit").total, logits[:, 1])
    probability = scored(folder, answers, label=label, output="probability").total
    close(probability, logits.softmax(-1)[:, 1])
    close(probability.logit(), scored(folder, answers, label=label).total)


def test_labels_that_are_true_or_false_each_by_itself_do_not_compete(tmp_path):
    folder = save_reward_model(
        tmp_path, "gpt2", num_labels=3, problem_type="multi_label_classification"
    )
    answers = text_answers(PROMPTS, COMPLETIONS)
    logits = torch.stack(
        [
            plain_logits(folder, ids_of(folder, p + c + EOS))
            for p, c in zip(PROMPTS, COMPLETIONS, strict=True)
        ]
    )
    close(scored(folder, answers, label=2).total, logits[:, 2])
    close(scored(folder, answers, label=2, output="probability").total, logits[:, 2].sigmoid())


RATINGS = ("helpfulness", "correctness", "verbosity")
TWO = {"num_labels": 2, **LABELS}
RATED = {"num_labels": 3, "problem_type": "regression", "id2label": dict(enumerate(RATINGS))}


@pytest.mark.parametrize("model_type", ["bert", "llama"])
def test_of_several_ratings_the_output_of_the_named_one_is_the_reward(model_type, tmp_path):
    folder = save_reward_model(tmp_path, model_type, **RATED)
    words = model_type == "bert"
    prompts, completions = (WORDS, ANSWERS) if words else (PROMPTS, COMPLETIONS)
    texts = [p + c + ("" if words else EOS) for p, c in zip(prompts, completions, strict=True)]
    answers = text_answers(prompts, completions)
    logits = torch.stack([plain_logits(folder, ids_of(folder, text)) for text in texts])
    for label in ("correctness", 1):
        close(scored(folder, answers, label=label).total, logits[:, 1])
    close(scored(folder, answers, label=1, output="logit").total, logits[:, 1])


def test_scores_are_shifted_and_scaled_by_mean_and_std(tmp_path):
    folder = save_reward_model(tmp_path, "gpt2")
    answers = text_answers(PROMPTS, COMPLETIONS)
    plain = scored(folder, answers).total
    close(scored(folder, answers, mean=0.25, std=4.0).total, (plain - 0.25) / 4)


def test_a_model_that_needs_code_of_its_repository_is_refused_and_served_instead(tmp_path):
    folder = save_reward_model(tmp_path, "bert")
    config = json.loads((folder / "config.json").read_text())
    config["model_type"] = "home_made"
    config["auto_map"] = {"AutoConfig": "code.Config"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "code.py").write_text("raise SystemExit('this must not run')")
    with pytest.raises(ValueError, match=r"(?s)needs code .* never run: .*scorer=http"):
        built(folder, tokenizer=save_reward_model(tmp_path / "other", "bert"))


def test_a_model_whose_weights_are_no_safetensors_is_refused(tmp_path):
    folder = save_reward_model(tmp_path, "gpt2")
    torch.save(plain_model(folder).state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"cannot load .*safetensors"):
        built(folder)


REFUSED = [
    ("bert", {}, {"ending": "eos"}, "leave scorer.ending out"),
    ("gpt2", {}, {"input_format": "pair"}, "use scorer.input_format=text"),
    ("gpt2", {}, {"input_format": "completion"}, "use scorer.input_format=text"),
    ("gpt2", {}, {"max_length": 257}, "max_length=257 is more than the 256 positions of GPT2"),
    ("roberta", {}, {"max_length": 66}, "more than the 65 positions of Roberta"),
    ("bert", {}, {"max_length": 3, "input_format": "pair"}, "leaves no token"),
    ("bert", TWO, {}, r"has 2 labels, .*0: 'bad', 1: 'good'"),
    ("bert", TWO, {"label": "nice"}, r"has 2 labels, .*0: 'bad', 1: 'good'"),
    ("llama", {"num_labels": 3}, {"label": 1}, r"problem_type=None .*scorer\.output=logit"),
    ("llama", RATED, {"label": 1, "output": "log_odds"}, r"=log_odds: .* 3 labels .*=logit"),
    ("llama", RATED, {"label": 1, "output": "probability"}, r"=probability: .* 3 labels .*=logit"),
    # It pools at the last column.
    ("xlnet", {"tokenizer": word_tokenizer()}, {}, r"XLNet.* with padding behind .*scorer=http"),
]


@pytest.mark.parametrize(("model_type", "saved", "settings", "message"), REFUSED)
def test_settings_that_do_not_fit_the_model_are_refused(
    model_type, saved, settings, message, tmp_path
):
    folder = save_reward_model(tmp_path, model_type, **saved)
    with pytest.raises(ValueError, match=message):
        built(folder, **settings)


def normalized_by(folder, **keys):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))
    return folder


def test_mean_and_std_of_a_foreign_reward_model_are_applied_once_and_named(tmp_path, caplog):
    folder = save_reward_model(tmp_path, "llama")
    answers = text_answers(PROMPTS, COMPLETIONS)
    # As OpenRLHF computes it: the head's value of the last token, which is EOS, in plain torch.
    model = plain_model(folder)
    texts = [p + c + EOS for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]
    with torch.no_grad():
        last = [
            model.model(input_ids=torch.tensor([ids_of(folder, text)])).last_hidden_state[0, -1]
            for text in texts
        ]
        raw = torch.stack(last) @ model.score.weight[0]
    close(scored(folder, answers).total, raw)
    own = {"normalize_reward": True, "value_head_prefix": "score"}
    normalized_by(folder, mean=3.5, std=0.25, **own)
    with caplog.at_level(logging.WARNING):
        close(scored(folder, answers).total, (raw - 3.5) / 0.25)
    assert "mean=3.5" in caplog.text
    close(scored(folder, answers, mean=1.0, std=2.0).total, (raw - 1) / 2)
    normalized_by(folder, normalize_reward=False)
    close(scored(folder, answers).total, raw)


@pytest.mark.parametrize("keys", [{"std": 0}, {"std": -1.0}, {"mean": "3"}, {"std": True}])
def test_mean_and_std_that_normalize_nothing_are_named(keys, tmp_path):
    folder = save_reward_model(tmp_path, "llama")
    normalized_by(folder, **({"mean": 3.5, "std": 0.25} | keys))
    with pytest.raises(ValueError, match=r"mean=.*std=.*config\.json"):
        scored(folder, text_answers(PROMPTS, COMPLETIONS))


def test_a_reward_model_that_continues_one_with_mean_and_std_is_exported_with_its_scores(tmp_path):
    folder = save_reward_model(tmp_path / "a", "llama")
    raw = load_scalar_model(folder)
    normalized_by(folder, mean=3.5, std=0.25)
    model = load_scalar_model(folder)
    torch.testing.assert_close(model.head.weight, raw.head.weight / 0.25)
    assert model.head.bias.item() == pytest.approx((raw.head.bias.item() - 3.5) / 0.25)
    tokenizer = load_tokenizer(folder)
    save_hf_model(model, tokenizer, tmp_path / "b", model.state_dict(), stop_ids=[0])
    again = load_scalar_model(tmp_path / "b")
    torch.testing.assert_close(again.head.bias, model.head.bias)
    assert "std" not in json.loads((tmp_path / "b/config.json").read_text())
    assert built(tmp_path / "b").normalized
    assert not built(normalized_by(tmp_path / "b", reward_normalized=False)).normalized
    normalized_by(tmp_path / "b", reward_normalized=True, problem_type=None)
    assert not built(tmp_path / "b", output="probability").normalized
