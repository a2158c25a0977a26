"""Servers write the responses of two ranks: those of one process, and no rank gathers the model."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.builders.ranks import rank_reports

SCRIPT = str(Path(__file__).with_name("served_stage.py"))


def rollouts(folder: Path, world_size: int, strategy: str, lag: int) -> list[dict]:
    arguments = [SCRIPT, str(folder), strategy, str(lag)]
    return rank_reports(arguments, folder, world_size=world_size)


@pytest.fixture(scope="module", params=[0, 1], ids=["no lag", "lag"])
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict:
    found = rollouts(tmp_path_factory.mktemp("alone"), 1, "auto", request.param)[0]
    return found | {"lag": request.param}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_get_the_responses_of_one_process_from_servers(alone, tmp_path, strategy):
    ranks = rollouts(tmp_path, 2, strategy, alone["lag"])
    rows = [first + second for first, second in zip(*(rank["rows"] for rank in ranks), strict=True)]
    assert len(rows) == 3
    assert rows[0] != rows[1]
    assert rows == alone["rows"]
    assert [rank["servers"] for rank in ranks] == [2, 0], "rank 0 alone talks to them"
    assert alone["whole"] > 0
    assert all((rank["whole"] == 0) == (strategy == "fsdp") for rank in ranks)
