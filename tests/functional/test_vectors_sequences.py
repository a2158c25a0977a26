import pytest
import torch

from rlhf_lightning.functional.sequences import (
    last_token_index,
    next_token_labels,
    position_ids,
    response_mask,
    response_state_index,
)
from tests.vectors.cases import Case, assert_matches, cases


@pytest.mark.parametrize("case", cases("response_mask"))
def test_response_mask_matches_the_vectors(case: Case):
    responses, stop_ids = case.ids("responses"), case.inputs["eos_ids"]
    mask = response_mask(responses, stop_ids)
    last = responses.gather(-1, last_token_index(mask)[:, None])
    computed = {
        "mask": mask,
        "lengths": mask.sum(-1),
        "has_eos": torch.isin(last, torch.tensor(stop_ids)).any(-1),
        "truncated": torch.where(mask, responses, 0),
    }
    if "truncated" not in case.expected:
        del computed["truncated"]
    assert mask.dtype == torch.bool
    assert_matches(case, computed, torch.float64)


@pytest.mark.parametrize("case", cases("rm_last_index"))
def test_last_token_and_positions_match_the_vectors(case: Case):
    for mask in (case.mask("attention_mask"), case.ids("attention_mask")):
        computed = {"last_index": last_token_index(mask), "position_ids": position_ids(mask)}
        assert_matches(case, computed, torch.float64)


def test_a_response_without_stop_ids_counts_whole():
    assert response_mask(torch.tensor([[1, 2, 3]]), []).all()


def test_the_last_index_of_a_row_without_tokens_is_in_range():
    mask = torch.tensor([[False, False], [False, True]])
    assert last_token_index(mask).tolist() == [0, 1]


def test_labels_are_the_next_learnt_tokens():
    input_ids = torch.tensor([[7, 8, 1, 2, 9], [7, 1, 9, 9, 9]])
    loss_mask = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 0, 0]]).bool()
    labels = next_token_labels(input_ids, loss_mask)
    assert labels.tolist() == [[-100, 1, 2, 9, -100], [1, 9, -100, -100, -100]]
    assert input_ids.tolist() == [[7, 8, 1, 2, 9], [7, 1, 9, 9, 9]]


def test_the_state_before_a_response_token_is_one_position_earlier():
    index = response_state_index(torch.tensor([3, 1, 0]), 4)
    assert index.tolist() == [[2, 3, 4, 5], [0, 1, 2, 3], [0, 0, 1, 2]]
    assert index.dtype == torch.int64


def test_labels_and_state_index_agree():
    sequence = torch.tensor([[5, 6, 1, 2, 3]])
    labels = next_token_labels(sequence, torch.tensor([[0, 0, 1, 1, 1]]).bool())
    read = labels.gather(1, response_state_index(torch.tensor([2]), 3))
    assert read.tolist() == [[1, 2, 3]]
