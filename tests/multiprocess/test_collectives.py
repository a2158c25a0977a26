"""What FSDP2 sends, counted by torch on two real ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.builders.ranks import rank_reports

# All of them, or the ranks would be started in both sets of tests.
pytestmark = [pytest.mark.thorough, pytest.mark.timeout(120)]
SCRIPT = str(Path(__file__).with_name("count_collectives.py"))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("collectives")
    return rank_reports([SCRIPT, str(folder)], folder)


def test_a_rollout_gathers_each_layer_once_however_long_the_answers_are(ranks):
    short, long = ([max(lengths) for lengths in rank["lengths"]] for rank in ranks)
    assert short == [1, 1]
    assert long == [40, 40], "the ranks must differ for this test to say anything"
    for rank in ranks:
        assert len(rank["gathered"]) == 2 * 3
        for sent in rank["gathered"][::3]:
            assert sent == {"_allgather_base_": rank["layers"] + 1}, sent


def test_scoring_gathers_policy_and_reference_once_for_all_micro_batches(ranks):
    for rank in ranks:
        for sent in rank["gathered"][1::3] + rank["gathered"][2::3]:
            # One number more: of how many micro-batches the ranks have.
            assert sent == {"_allgather_base_": rank["layers"] + 1, "allreduce_": 1}, sent


def test_gradients_of_every_micro_batch_are_scattered_and_none_stays_whole(ranks):
    for rank in ranks:
        assert rank["backwards"] == 2 * 4 * 2  # iterations, micro-batches, losses
        assert rank["whole"] == 0
        for sent in rank["updates"]:
            assert sent["_reduce_scatter_base_"] == 4 * sum(rank["units"])


def test_gradients_that_are_sent_once_a_step_train_the_same_weights(ranks, tmp_path):
    once = rank_reports([SCRIPT, str(tmp_path), "step"], tmp_path)
    for rank, other in zip(once, ranks, strict=True):
        assert rank["whole"] > 0
        for sent in rank["updates"]:
            assert sent["_reduce_scatter_base_"] == sum(rank["units"])
        assert rank["weights"] == pytest.approx(other["weights"], rel=0, abs=1e-5)
