"""A reward model as an annotator, beside the same weights run row by row through transformers."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rlhf_lightning.models.factory import load_policy, load_scalar_model
from rlhf_lightning.modules.export import save_hf_model
from rlhf_lightning.preferences.records import Pair
from rlhf_lightning.preferences.reward_annotator import RewardModelAnnotator
from tests.builders.models import config_fields
from tests.builders.tokenizers import CHATML, build_tokenizer

CHAT = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"})
PLAIN = [
    Pair.make(f"question {n}", *(f"yes {n}", f"no, {'not ' * n}really")[:: 1 if n % 2 else -1])
    for n in range(6)
]
CHATS = [Pair.make(CHAT, "4", f"it is {n}") for n in range(3)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny reward model with random weights, as the reward stage exports it."""
    root = tmp_path_factory.mktemp("models")
    tokenizer = build_tokenizer(template=CHATML)
    stops = [int(tokenizer.eos_token_id)]
    size = {"vocab_size": len(tokenizer), "max_position_embeddings": 256}
    fields = config_fields("llama", **size, eos_token_id=stops[0], pad_token_id=stops[0])
    policy = load_policy(from_scratch=fields)
    save_hf_model(policy, tokenizer, root / "policy", policy.state_dict(), stop_ids=stops)
    reward = load_scalar_model(root / "policy", head="reward", seed=3)
    save_hf_model(reward, tokenizer, root / "reward", reward.state_dict(), stop_ids=stops)
    return root / "reward"


@cache
def loaded(folder: Path):
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder), model.eval()


def score(folder: Path, prompt, answer: str) -> float:
    """One row through transformers, read at its last token."""
    tokenizer, model = loaded(folder)
    if isinstance(prompt, str):
        ids = tokenizer(prompt + answer)["input_ids"] + [tokenizer.eos_token_id]
    else:
        messages = [*prompt, {"role": "assistant", "content": answer}]
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        ids = tokenizer(text.rstrip("\n"), add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        hidden = model.model(torch.tensor([ids])).last_hidden_state
        return float(model.score(hidden)[0, -1, 0])


def test_the_answer_with_the_higher_score_is_preferred_plain_and_in_chats(folder: Path) -> None:
    labels = RewardModelAnnotator(folder, micro_batch_size=4).label([*PLAIN, *CHATS])
    for pair, label in zip([*PLAIN, *CHATS], labels, strict=True):
        gap = score(folder, pair.prompt, pair.first) - score(folder, pair.prompt, pair.second)
        assert label.choice == ("first" if gap > 0 else "second")
        assert label.margin == pytest.approx(abs(gap), rel=1e-4, abs=1e-5)
        assert (label.pair_id, label.kind) == (pair.pair_id, "reward_model")
    assert len({label.choice for label in labels}) == 2


def test_the_template_is_given_the_variables_of_a_pair_and_must_write_them(folder: Path) -> None:
    columns = {"tools": '[{"type": "function", "function": {"name": "weather"}}]'}
    pair = Pair.make(CHAT, "4", "it is 5", columns=columns)
    (without,) = RewardModelAnnotator(folder).label([Pair.make(CHAT, "4", "it is 5")])
    annotator = RewardModelAnnotator(folder)
    with pytest.raises(ValueError, match="does not write tools"):
        annotator.label([pair])
    annotator._loaded[0].chat_template = "{{ tools | tojson if tools }}" + CHATML
    (told,) = annotator.label([pair])
    assert told.margin != without.margin


def test_an_answer_that_is_too_long_is_skipped_and_near_scores_are_ties(folder: Path) -> None:
    short = len("question 0no, really") + 1
    limited = RewardModelAnnotator(folder)
    limited._loaded[1].trunk.config.max_position_embeddings = short
    for annotator in (RewardModelAnnotator(folder, max_length=short), limited):
        labels = annotator.label(PLAIN)
        assert [label.choice == "skip" for label in labels] == [False] + [True] * 5
        assert labels[1].reason == f"longer than {short} tokens"
    ties = RewardModelAnnotator(folder, tie_below=1e6).label(PLAIN)
    assert {label.choice for label in ties} == {"tie"}
