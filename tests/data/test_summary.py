from __future__ import annotations

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from rlhf_lightning.data.records import (
    DemonstrationRecord,
    PromptRecord,
)
from rlhf_lightning.data.summary import summarize
from tests.builders.encoding import encode_all
from tests.builders.tokenizers import word_tokenizer


def test_a_summary_counts_rows_domains_lengths_duplicates_and_what_is_left_out(tokenizer):
    records = [
        DemonstrationRecord("ab", "x", "sums"),
        DemonstrationRecord("ab", "x", "sums"),
        DemonstrationRecord("abcd", "xyz", "lists"),
        DemonstrationRecord("a" * 50, "x"),
        DemonstrationRecord("a", "x" * 50),
    ]
    rows, report = encode_all(records, tokenizer, max_length=20, over_long="truncate_left")
    report.skipped.append("line 3: oops")
    summary = summarize(rows, name="train", report=report)
    assert summary.num_rows == 4
    assert summary.domains == {"sums": 2, "lists": 1, "": 1}
    assert summary.lengths["prompt"] == (2, 3, 18, 18)
    assert summary.lengths["response"] == (2, 2, 4, 4)
    assert summary.num_duplicates == 1
    assert summary.num_truncated == 1
    assert dict(summary.dropped) == {"response alone over-long": 1}
    text = summary.render()
    for part in ("sums 2, lists 1, (none) 1", "2 / 3 / 18 / 18", "cut from the left", "skipped"):
        assert part in text


@pytest.mark.parametrize(
    ("record", "known"),
    [
        (DemonstrationRecord("w1", "w2"), True),
        (DemonstrationRecord("w1", "w2 Größe"), False),
        (PromptRecord("w1 tea"), False),
        (DemonstrationRecord("w1", "w2 [UNK]", rendered=True), True),
    ],
)
def test_text_that_the_tokenizer_does_not_know_is_counted(record, known):
    words = word_tokenizer()
    words.eos_token = "[SEP]"
    rows, report = encode_all([record, record], words, max_length=20)
    summary = summarize(rows, name="train", report=report)
    assert summary.num_unknown == (0 if known else 2)
    assert ("unknown to the tokenizer" in summary.render()) == (not known)
    words.eos_token = "[UNK]"  # GPT-2 and SmolLM: no text is unknown, and one token is for all
    _, report = encode_all([record], words, max_length=20)
    assert report.num_unknown == 0


@pytest.mark.parametrize(("completion", "count"), [("ba b", 0), ("ba é", 1)])
@pytest.mark.parametrize("is_chat", [False, True])
def test_text_that_a_tokenizer_without_unk_leaves_out_is_counted(completion, count, is_chat):
    core = Tokenizer(BPE(vocab={"a": 0, "b": 1, "</s>": 2}, merges=[]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    prompt, answer = "ab", completion
    if is_chat:
        prompt = ({"role": "user", "content": "ab"},)
        answer = ({"role": "assistant", "content": completion},)
    _, report = encode_all([DemonstrationRecord(prompt, answer)], tokenizer, max_length=20)
    assert report.num_unknown == count
