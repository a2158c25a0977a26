from __future__ import annotations

import torch

from rlhf_lightning.data.collate import PreferenceCollator, PromptCollator, SFTCollator
from rlhf_lightning.data.encode import encode_prompt
from rlhf_lightning.data.records import DemonstrationRecord, PreferenceRecord, PromptRecord
from tests.builders.encoding import encode_one

WIDE = {"max_length": 1000}


def test_sequences_are_padded_on_the_right_and_eos_stays_learnt_where_pad_is_eos(tokenizer):
    answers = ["xyz", "x"]
    rows = [encode_one(DemonstrationRecord("ab", a, domain=a), tokenizer, **WIDE) for a in answers]
    batch = SFTCollator(tokenizer.pad_token_id)(rows)
    eos = tokenizer.eos_token_id
    assert tokenizer.pad_token_id == eos
    assert batch.input_ids.shape == (2, 6)
    assert batch.input_ids[1].tolist() == [*tokenizer("abx").input_ids, eos, eos, eos]
    assert batch.attention_mask.tolist() == [[True] * 6, [True] * 4 + [False] * 2]
    assert batch.loss_mask.tolist() == [
        [False] * 2 + [True] * 4,
        [False] * 2 + [True] * 2 + [False] * 2,
    ]
    assert batch.loss_mask.sum(1).tolist() == [len(a) + 1 for a in answers]
    assert batch.domains == ("xyz", "x")
    assert batch.input_ids.dtype == torch.int64


def test_both_sides_of_pairs_share_one_width_and_know_their_lengths(tokenizer):
    records = [
        PreferenceRecord("ab", "x", "wxyz", domain="d", margin=0.5),
        PreferenceRecord("a", "xy", "y"),
    ]
    rows = [encode_one(record, tokenizer, **WIDE) for record in records]
    batch = PreferenceCollator(tokenizer.pad_token_id)(rows)
    assert batch.chosen_input_ids.shape == batch.rejected_input_ids.shape == (2, 7)
    assert batch.chosen_attention_mask.sum(1).tolist() == [4, 4]
    assert batch.rejected_attention_mask.sum(1).tolist() == [7, 3]
    assert batch.chosen_attention_mask[0].tolist() == [True] * 4 + [False] * 3
    assert batch.chosen_length.tolist() == [2, 3]
    assert batch.rejected_length.tolist() == [5, 2]
    assert batch.margin.tolist() == [0.5, 0.0]
    assert batch.domains == ("d", "")
    assert batch.chosen_input_ids[0, 3] == tokenizer.eos_token_id


def test_prompts_are_padded_on_the_left_and_keep_ids_and_columns(tokenizer):
    records = [
        PromptRecord("abc", "d", {"answer": "1"}),
        PromptRecord("a", columns={"hint": "h"}),
    ]
    prompts = [encode_prompt(record, tokenizer, **WIDE) for record in records]
    batch = PromptCollator(tokenizer.pad_token_id)(list(zip(prompts, [70, 71], strict=True)))
    pad = tokenizer.pad_token_id
    assert batch.input_ids[1].tolist() == [pad, pad, *tokenizer("a").input_ids]
    assert batch.attention_mask.tolist() == [[True] * 3, [False, False, True]]
    assert batch.row_ids.tolist() == [70, 71]
    assert batch.row_ids.dtype == torch.int64
    assert batch.domains == ("d", "")
    assert batch.columns == {"answer": ("1", None), "prompt": ("abc", "a"), "hint": (None, "h")}
