"""What FSDP2 sends, counted by torch on two real ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.builders.ranks import ROOT, run_ranks

SCRIPT = str(Path(__file__).with_name("count_collectives.py"))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("collectives")
    run_ranks(
        [SCRIPT, str(folder)], world_size=2, folder=folder, environment={"PYTHONPATH": str(ROOT)}
    ).check()
    return [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.timeout(120)
def test_a_rollout_gathers_each_layer_once_however_long_the_answers_are(ranks):
    short, long = ([max(lengths) for lengths in rank["lengths"]] for rank in ranks)
    assert short == [1, 1]
    assert long == [40, 40], "the ranks must differ for this test to say anything"
    for rank in ranks:
        assert len(rank["generated"]) == 2
        for sent in rank["generated"]:
            assert sent == {"_allgather_base_": rank["layers"] + 1}, sent


@pytest.mark.timeout(120)
def test_gradients_of_every_micro_batch_are_scattered_and_none_stays_whole(ranks):
    for rank in ranks:
        assert rank["backwards"] == 2 * 4 * 2  # iterations, micro-batches, losses
        assert rank["whole"] == 0
        for sent in rank["updates"]:
            assert sent["_reduce_scatter_base_"] == 4 * sum(rank["units"])
