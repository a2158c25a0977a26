"""What of a conversation is learnt: the last response, or all turns of the assistant."""

import json
from itertools import cycle, groupby
from pathlib import Path

import pytest

from rlhf_lightning import DemonstrationDataModule
from rlhf_lightning.data.errors import BadRecordError
from rlhf_lightning.data.sources.given import GivenRows
from rlhf_lightning.data.summary import render_examples
from tests.builders.encoding import encode_all
from tests.builders.tokenizers import FAMILIES, KINDS, build_tokenizer, family_tokenizer

VECTORS = Path(__file__).resolve().parents[3] / "shared" / "vectors" / "conversation.json"
PLAIN = (
    "{{ bos_token }}{% for m in messages %}{{ m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
# As Qwen 3 does: thoughts of earlier turns are left out, and the prompt does not hold <think>.
DROPS_THOUGHTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def conversation(*texts, **last):
    roles = ("user", "assistant") * len(texts)
    messages = [{"role": r, "content": t} for r, t in zip(roles, texts, strict=False)]
    messages[-1] |= last
    return messages


def encoded(messages, tokenizer, loss_on="all", max_length=400, **options):
    rows = [{"messages": messages, **options.pop("row", {})}]
    source = GivenRows(rows, validation_fraction=0, **options)
    records = source.records("demonstrations", "train")
    return encode_all(records, tokenizer, max_length=max_length, loss_on=loss_on)


def learnt(messages, tokenizer, loss_on="all", **options):
    """Return the rows as the screen shows them, what is learnt in [[ ]]."""
    rows, _ = encoded(messages, tokenizer, loss_on, **options)
    text = render_examples(rows, tokenizer, len(rows))
    return [line for line in text.split("example ") if line]


def test_masks_by_hand():
    tokenizer = build_tokenizer(template=PLAIN)
    ((row,), _) = encoded(conversation("ab", "cde", "f", "gh"), tokenizer)
    # <s> a b, c d e end, f, g h end
    mask = [0, 0, 0, 1, 1, 1, 1, 0, 1, 1, 1]
    assert row.loss_mask.tolist() == list(map(bool, mask))
    ((row,), _) = encoded(conversation("ab", "cde", "f", "gh"), tokenizer, "last")
    assert row.loss_mask.tolist() == [False] * 8 + [True] * 3


def test_masks_of_several_turns_are_those_of_an_independent_implementation():
    if not VECTORS.exists():
        pytest.skip(f"the masks are not in {VECTORS}")
    tokenizer = build_tokenizer(template=PLAIN)
    masks = [m for case in json.loads(VECTORS.read_text())["cases"] for m in case["inputs"]["mask"]]
    for mask in masks:
        # Each turn has its stop token behind it; in front are BOS and a character of the user.
        runs = [(bool(on), len(list(same))) for on, same in groupby(mask)]
        runs = runs if runs[-1][0] else runs[:-1]  # padding
        messages = [{"role": "user", "content": "u"}]
        wanted = [False, False]
        for on, length in runs:
            messages.append({"role": "assistant" if on else "user", "content": "x" * length})
            wanted += [on] * (length + on)
        ((row,), _) = encoded(messages, tokenizer)
        assert row.loss_mask.tolist() == wanted


@pytest.mark.parametrize(("family", "kind"), zip(FAMILIES, cycle(KINDS), strict=False))
def test_each_turn_is_learnt_with_the_token_that_ends_it(family, kind):
    tokenizer = family_tokenizer(family, kind)
    texts = ("Hi", "Yes, why", "No", "So be it", "Ok", "Bye")
    ((row,), _) = encoded(conversation(*texts), tokenizer)
    ends = row.input_ids == tokenizer.convert_tokens_to_ids(FAMILIES[family][-1])
    runs = [
        tokenizer.decode([int(i) for _, i in run]).strip()
        for on, run in groupby(zip(row.loss_mask, row.input_ids, strict=True), lambda x: bool(x[0]))
        if on
    ]
    assert runs == [f"{text}{FAMILIES[family][-1]}" for text in texts[1::2]]
    assert (row.loss_mask & ends).sum() == 3
    alone = [encoded(conversation(*texts[:n]), tokenizer, "last")[0][0] for n in (2, 4, 6)]
    assert row.loss_mask.sum() == sum(one.loss_mask.sum() for one in alone)
    assert [row.input_ids[: len(one)].tolist() for one in alone] == [
        one.input_ids.tolist() for one in alone
    ]


def test_a_turn_of_weight_0_is_not_learnt_and_the_last_learnt_one_is_the_response():
    tokenizer = build_tokenizer(template=PLAIN)
    messages = conversation("a", "b", "c", "d", "e", "f")
    messages[3]["train"] = False
    assert learnt(messages, tokenizer) == ["1: <s>a[[b<|im_end|>]]cd<|im_end|>e[[f<|im_end|>]]"]
    messages[5]["weight"] = 0
    for loss_on in ("all", "last"):
        assert learnt(messages, tokenizer, loss_on) == ["1: <s>a[[b<|im_end|>]]"]
    messages[1]["weight"] = 0
    with pytest.raises(BadRecordError, match=r"weight 0"):
        encoded(messages, tokenizer)


def test_a_turn_that_is_written_in_another_way_later_is_a_row_of_its_own():
    tokenizer = build_tokenizer(template=DROPS_THOUGHTS)
    messages = conversation("a", "b", "c", "d", "e", "f", reasoning_content="z")
    messages[1]["reasoning_content"] = "x"
    rows = learnt(messages, tokenizer)
    open_, end = "<|im_start|>", "<|im_end|>"
    assert rows == [
        f"1: {open_}user\na{end}\n{open_}assistant\n[[<think>x</think>b{end}]]\n",
        f"2: {open_}user\na{end}\n{open_}assistant\nb{end}\n{open_}user\nc{end}\n"
        f"{open_}assistant\n[[d{end}]]\n{open_}user\ne{end}\n{open_}assistant\n"
        f"[[<think>z</think>f{end}]]",
    ]


def test_a_row_that_is_too_long_leaves_its_shorter_turns():
    tokenizer = build_tokenizer(template=PLAIN)
    messages = conversation("a", "b", "c", "d", "e" * 9, "f")
    rows, report = encoded(messages, tokenizer, max_length=9)
    assert [tokenizer.decode(row.input_ids) for row in rows] == ["<s>ab<|im_end|>cd<|im_end|>"]
    assert sum(report.dropped.values()) == 1


def test_an_empty_turn_is_named_and_a_weight_of_0_is_the_way_on():
    tokenizer = build_tokenizer(template=PLAIN)
    messages = conversation("a", "", "c", "d")
    with pytest.raises(BadRecordError, match=r"row 1: message 2 .*empty.*weight: 0"):
        encoded(messages, tokenizer)
    messages[1]["weight"] = 0
    assert learnt(messages, tokenizer) == ["1: <s>a<|im_end|>c[[d<|im_end|>]]"]


def test_plain_records_have_no_turns():
    source = GivenRows([{"prompt": "a", "completion": "b"}], validation_fraction=0)
    records = source.records("demonstrations", "train")
    with pytest.raises(BadRecordError, match="loss_on=all"):
        encode_all(records, build_tokenizer(), max_length=9, loss_on="all")
    with pytest.raises(ValueError, match=r"loss_on=all .*texts"):
        DemonstrationDataModule([], build_tokenizer(), batch_size=1, kind="texts", loss_on="all")


@pytest.mark.parametrize(("first", "told"), [("a", True), ("{0}", False)])
def test_held_out_turns_that_training_learns_too_are_counted(caplog, first, told):
    texts = [conversation(first.format(n), "b", f"{n}", "d") for n in "pqrstuvwxy"]
    rows = GivenRows([{"messages": one} for one in texts], validation_fraction=0.3)
    tokenizer = build_tokenizer(template=PLAIN)
    data = DemonstrationDataModule(rows, tokenizer, batch_size=1, loss_on="all")
    total = 1 + len(data.rows("validation"))
    assert (f"1 of {total} held-out turns are trained on too" in caplog.text) is told
