"""The token rows that TRL 1.16 and we make of the same records, tokenized byte by byte."""

from __future__ import annotations

import pytest
from datasets import Dataset

pytest.importorskip("trl", reason="TRL is in the extra `dev`", exc_type=ImportError)

from trl import RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

from rlhf_lightning.data.records import DemonstrationRecord, PreferenceRecord
from rlhf_lightning.text.tokenizers import classifier_tokenizer
from tests.builders.encoding import encode_one
from tests.builders.tokenizers import CHATML, build_tokenizer
from tests.parity.both import COMMON, export_policy_folder, export_reward_folder

pytestmark = pytest.mark.timeout(120)

PROMPT = ({"role": "user", "content": "Name a colour."},)
GOOD = ({"role": "assistant", "content": "Blue is one."},)
BAD = ({"role": "assistant", "content": "No."},)
WITHOUT_NEWLINE = CHATML.replace("<|im_end|>\n", "<|im_end|>")


def trl_demonstration(tmp_path, tokenizer, row):
    folder = export_policy_folder(tmp_path / "sft", "llama")
    config = SFTConfig(str(tmp_path), completion_only_loss=True, **COMMON)
    rows = Dataset.from_list([row])
    run = SFTTrainer(str(folder), config, train_dataset=rows, processing_class=tokenizer)
    (made,) = run.train_dataset
    return made["input_ids"], [label for label in made["labels"] if label != -100]


def our_demonstration(tokenizer, prompt, completion):
    row = encode_one(DemonstrationRecord(prompt, completion), tokenizer, max_length=999)
    return row.input_ids.tolist(), row.input_ids[row.loss_mask].tolist()


def as_lists(**columns):
    return {name: list(messages) for name, messages in columns.items()}


@pytest.mark.parametrize("adds_bos", [False, True])
def test_plain_demonstrations_become_the_same_rows(adds_bos, tmp_path):
    tokenizer = build_tokenizer(adds_bos=adds_bos)
    row = {"prompt": "two and two", "completion": " are four"}
    theirs = trl_demonstration(tmp_path, tokenizer, row)
    assert our_demonstration(tokenizer, row["prompt"], row["completion"]) == theirs
    assert theirs[1][-1] == tokenizer.eos_token_id


def test_conversations_become_the_same_rows_where_eos_ends_the_template(tmp_path):
    tokenizer = build_tokenizer(template=WITHOUT_NEWLINE)
    theirs = trl_demonstration(tmp_path, tokenizer, as_lists(prompt=PROMPT, completion=GOOD))
    assert our_demonstration(tokenizer, PROMPT, GOOD) == theirs


def test_what_a_template_writes_behind_eos_is_learnt_by_trl_and_cut_here(tmp_path):
    # On purpose: generation stops at EOS, so a policy never writes the newline of ChatML.
    tokenizer = build_tokenizer(template=CHATML)
    theirs = trl_demonstration(tmp_path, tokenizer, as_lists(prompt=PROMPT, completion=GOOD))
    ours = our_demonstration(tokenizer, PROMPT, GOOD)
    newline = tokenizer("\n")["input_ids"]
    assert tuple(part + newline for part in ours) == theirs


@pytest.mark.parametrize("template", [WITHOUT_NEWLINE, CHATML])
def test_pairs_end_at_eos_in_both_with_the_tokenizer_of_an_exported_reward_model(
    template, tmp_path
):
    tokenizer = build_tokenizer(template=template)
    exported = classifier_tokenizer(tokenizer)
    folder = export_reward_folder(tmp_path / "reward", "llama")
    rows = Dataset.from_list([as_lists(prompt=PROMPT, chosen=GOOD, rejected=BAD)])
    config = RewardConfig(str(tmp_path), **COMMON)
    run = RewardTrainer(str(folder), config, train_dataset=rows, processing_class=exported)
    (theirs,) = run.train_dataset
    ours = encode_one(PreferenceRecord(PROMPT, GOOD, BAD), tokenizer, max_length=999)
    assert ours.chosen_input_ids.tolist() == theirs["chosen_ids"]
    assert ours.rejected_input_ids.tolist() == theirs["rejected_ids"]
    assert theirs["chosen_ids"][-1] == tokenizer.eos_token_id != exported.pad_token_id
