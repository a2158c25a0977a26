"""The judge's figures over real HTTP, with judges whose agreement is known beforehand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import judge_agreement
from tests.builders.chat_server import ChatServer, always_a, prefers_longer, serving

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def pandalm(tmp_path: Path) -> Path:
    """Ten pairs: of eight people prefer the longer answer, of one the shorter, and one is a tie."""
    rows = []
    for n in range(10):
        texts = [f"a long answer to number {n}", f"short {n}"]
        longer = 1 if n % 2 else 2
        votes = {8: [3 - longer] * 3, 9: [0, 0, longer]}.get(n, [longer, longer, 0])
        rows.append(
            {
                "instruction": f"request {n}",
                "input": "",
                "response1": texts[longer - 1],
                "response2": texts[2 - longer],
                **{f"annotator{i}": vote for i, vote in enumerate(votes, start=1)},
            }
        )
    file = tmp_path / "testset.json"
    file.write_text(json.dumps(rows))
    return file


def figures(server: ChatServer, pandalm: Path, *more: str) -> dict[str, Any]:
    out = pandalm.with_name("figures.json")
    given = ["--pandalm", str(pandalm), "--url", server.url, "--model", "m", "--out", str(out)]
    judge_agreement.main([*given, "--journal", str(pandalm.with_name("judge.jsonl")), *more])
    return json.loads(out.read_text())


def test_a_judge_that_likes_length_agrees_as_often_as_length_does(pandalm: Path) -> None:
    with serving(prefers_longer) as server:
        found = figures(server, pandalm)
    assert found["people"] == {"first": 5, "second": 4, "tie": 1}
    assert found["agrees_with_people"]["value"] == pytest.approx(8 / 9)
    assert found["agrees_with_people"] == found["longer_agrees_with_people"]
    assert found["replies"]["shown_first_wins"]["value"] == 0.5
    assert found["replies"]["consistent"]["value"] == 1.0
    assert found["unreadable_share"] == 0.0


def test_a_judge_that_names_what_comes_first_agrees_by_chance_and_is_seen_through(
    pandalm: Path,
) -> None:
    with serving(always_a) as server:
        found = figures(server, pandalm)
    assert found["labels"] == {"tie": 10}
    assert found["agrees_with_people"] == {"value": None, "low": None, "high": None, "num": 0}
    assert found["replies"]["shown_first_wins"]["value"] == 1.0
    assert found["replies"]["consistent"]["value"] == 0.0
    orders = found["agrees_in_one_order"]
    assert [orders[o]["value"] for o in ("first", "second")] == pytest.approx([5 / 9, 4 / 9])


def test_what_was_asked_is_not_asked_again_and_rambling_is_counted(pandalm: Path) -> None:
    with serving(*[prefers_longer] * 5, lambda *_: "Well, both have merits.") as server:
        first = figures(server, pandalm, "--pairs", "4")
        assert len(server.requests) == 8
        again = figures(server, pandalm, "--pairs", "4")
        assert len(server.requests) == 8
    assert first["unreadable_share"] == 3 / 8
    assert first["labels"]["skip"] >= 2
    assert again | {"seconds_a_request": None} == first | {"seconds_a_request": None}
    assert again["seconds_a_request"] is None
