"""What the doctor measures on answers."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch

from rlhf_lightning.doctor.metrics import (
    ResponseRecord,
    response_metrics,
)


def answer(row: int, **changes: object) -> ResponseRecord:
    plain = ResponseRecord(row, row, "sums", float(row % 3), 4 + row % 2, (row, row + 1), 0.0, 1.0)
    return replace(plain, **changes)


def test_measures_do_not_depend_on_how_ranks_share_the_answers() -> None:
    rows = [answer(i, second=math.sin(i), surplus=0.1 * i) for i in range(12)]
    shuffled = random.Random(1).sample(rows, 12)
    assert response_metrics(rows, score_clip=1.5) == response_metrics(shuffled, score_clip=1.5)


def test_the_most_common_answer_is_counted() -> None:
    rows = [answer(i, tokens=(7,) if i < 6 else (i, 8)) for i in range(8)]
    assert response_metrics(rows, score_clip=None)["most_common"] == pytest.approx(6 / 8)


def test_one_answer_to_all_copies_of_a_prompt_is_not_one_to_many_prompts() -> None:
    settled = [answer(i, group_id=i // 4, tokens=(i // 4, 8)) for i in range(8)]
    assert response_metrics(settled, score_clip=None)["most_common"] == 1 / 8
    alike = [*settled[:6], *(replace(row, tokens=(0, 8)) for row in settled[6:])]
    assert response_metrics(alike, score_clip=None)["most_common"] == 6 / 8
    assert "most_common" not in response_metrics(settled[:4], score_clip=None)


def test_domains_are_judged_by_the_second_scorer_alone_where_there_is_one() -> None:
    rows = [answer(i, domain="ab"[i % 2], score=7.0) for i in range(6)]
    by_score = response_metrics(rows, score_clip=None)
    assert (by_score["domain_score/a"], by_score["domain_score/b"]) == (7.0, 7.0)
    not_asked = response_metrics(rows, score_clip=None, second_scorer=True)
    assert not [name for name in not_asked if name.startswith("domain_score")]
    asked = [replace(row, second=float(row.row_id % 2)) for row in rows]
    by_second = response_metrics(asked, score_clip=None, second_scorer=True)
    assert (by_second["domain_score/a"], by_second["domain_score/b"]) == (0.0, 1.0)
    assert (by_second["second_score"], by_second["second_std"]) == (0.5, 0.5)


def test_lengths_that_differ_between_domains_are_no_correlation() -> None:
    # Long answers score high only because their domain does both.
    rows = [answer(i, domain="talk", length=20, score=5.0) for i in range(4)]
    rows += [
        answer(i, domain="sums", length=3 + i % 2, score=1.0 + i // 2 % 2) for i in range(4, 8)
    ]
    assert response_metrics(rows, score_clip=None)["length_correlation"] == pytest.approx(0)


def test_a_score_that_is_the_length_correlates_fully() -> None:
    rows = [answer(i, length=i + 2, score=2.0 * i) for i in range(6)]
    assert response_metrics(rows, score_clip=None)["length_correlation"] == pytest.approx(1)


def test_refusals_count_only_on_harmful_prompts() -> None:
    rows = [answer(0, refused=True), answer(1, refused=False), answer(2), answer(3)]
    found = response_metrics(rows, score_clip=None)
    assert (found["refusal_rate"], found["harmful_prompts"]) == (0.5, 2.0)
    assert "refusal_rate" not in response_metrics(rows[2:], score_clip=None)


@pytest.mark.parametrize("kept", [None, 5])
def test_surprise_less_entropy_is_zero_on_average_unless_the_sampler_truncates(
    kept: int | None,
) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(4000, 40, generator=generator) * 2
    logprobs = logits.log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    drawn_from = logprobs
    if kept is not None:
        least = logprobs.topk(kept).values[:, -1:]
        drawn_from = logprobs.masked_fill(logprobs < least, -math.inf)
    tokens = torch.multinomial(drawn_from.exp(), 1, generator=generator)
    gap = (-logprobs.gather(1, tokens).squeeze(1) - entropy).double()
    rows = [
        answer(i, length=40, surplus=float(part.sum()), surplus_squares=float(part.square().sum()))
        for i, part in enumerate(gap.view(100, 40))
    ]
    found = response_metrics(rows, score_clip=None)
    sigmas = found["sampler_bias"] / found["sampler_error"]
    if kept is None:
        assert abs(sigmas) < 4
    else:
        assert sigmas < -10


def test_answers_without_a_score_are_in_no_measure_of_scores() -> None:
    rows = [answer(i, domain="ab"[i % 2], score=float(i), length=i + 2) for i in range(6)]
    more = [answer(9, domain="a", score=math.nan, length=40, second=5.0)]
    found = response_metrics(rows + more, score_clip=2.0)
    alone = response_metrics(rows, score_clip=2.0)
    for name in ("length_correlation", "clipped", "domain_score/a", "domain_score/b"):
        assert found[name] == alone[name]
    seconds = [replace(row, second=float(row.row_id)) for row in rows]
    by_second = response_metrics(seconds + more, score_clip=2.0, second_scorer=True)
    assert by_second["second_score"] == 2.5
    assert by_second["second_correlation"] == pytest.approx(1)
    only = response_metrics(more, score_clip=2.0)
    assert not {"length_correlation", "domain_score/a"} & set(only)
    assert only["clipped"] == 0
