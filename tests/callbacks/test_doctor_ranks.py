"""Two ranks with half of the answers each measure what one rank does with all of them."""

from __future__ import annotations

import pytest

from rlhf_lightning.batches import PromptBatch, RolloutBatch
from rlhf_lightning.callbacks.doctor.records import Refusals, all_records, responses_of
from rlhf_lightning.doctor.metrics import response_metrics
from rlhf_lightning.modules.metrics import novelty
from tests.builders.models import tiny_tokenizer
from tests.builders.ranks import SimulatedRanks
from tests.builders.stages import (
    GROUP,
    ROWS,
    built,
    grouped,
    prompts,
    rollout_of,
    tiny_grpo,
    tiny_module,
)

HALVES = (slice(0, ROWS // 2), slice(ROWS // 2, ROWS))
REFUSALS = Refusals(("a",), (r"\bw\d\b",))


@pytest.fixture(scope="module")
def whole() -> tuple[RolloutBatch, PromptBatch]:
    batch = prompts(domains=["a", "b", "b", "a"] * (ROWS // 4))
    return rollout_of(built(tiny_module()), batch), batch


def measured(rollout: RolloutBatch, batch: PromptBatch) -> dict[str, float]:
    answers = responses_of(rollout, batch, tiny_tokenizer())
    seconds = [float(len(text)) for text in answers.completions]
    return response_metrics(all_records(rollout, answers, REFUSALS, seconds), score_clip=1.0)


def test_every_rank_measures_exactly_what_one_rank_would(whole, monkeypatch) -> None:
    rollout, batch = whole
    alone = measured(rollout, batch)
    assert {"refusal_rate", "second_correlation", "domain_score/b"} <= set(alone)

    def half(rank: int) -> dict[str, float]:
        return measured(rollout[HALVES[rank]], batch[HALVES[rank]])

    assert SimulatedRanks(monkeypatch, 2).run(half) == [alone, alone]


def test_the_prompts_of_a_rollout_in_groups_are_counted_and_not_its_responses() -> None:
    batch = grouped(prompts(rows=ROWS // GROUP, domains=["a", "b", "b", "a"]))
    found = measured(rollout_of(built(tiny_grpo()), batch), batch)
    assert found["harmful_prompts"] == 2.0


def test_novelty_does_not_depend_on_how_ranks_share_the_answers(whole, monkeypatch) -> None:
    rollout, batch = whole
    alone = novelty(responses_of(rollout, batch, tiny_tokenizer()))

    def half(rank: int) -> list[float]:
        part = HALVES[rank]
        return novelty(responses_of(rollout[part], batch[part], tiny_tokenizer()))

    first, second = SimulatedRanks(monkeypatch, 2).run(half)
    assert [*first, *second] == alone
    assert len(set(alone)) > 1
