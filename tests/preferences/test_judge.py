"""The judge over real HTTP: both orders, ties, unreadable replies, retries and cost."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from rlhf_lightning.preferences.annotators import AnnotationError
from rlhf_lightning.preferences.judge import (
    JudgeAnnotator,
    Judgement,
    judge_figures,
    letter_probabilities,
)
from rlhf_lightning.preferences.records import Journal, Pair
from rlhf_lightning.text.verdict import parse_verdict
from tests.builders.chat_server import (
    always_a,
    completion,
    failing,
    failure,
    prefers_longer,
    serving,
)

PAIRS = [
    Pair.make(f"request {i}", f"short {i}", f"quite a bit longer {i}")
    if i % 2
    else Pair.make(f"request {i}", f"quite a bit longer {i}", f"short {i}")
    for i in range(12)
]


def judge(server, **changes) -> JudgeAnnotator:
    settings = {
        "model": "tiny-judge",
        "base_url": server.url,
        "api_key_env": None,
        "timeout": 10.0,
    }
    return JudgeAnnotator(**(settings | changes))


def test_both_orders_are_asked_and_a_side_wins_if_both_name_it() -> None:
    with serving(prefers_longer) as server:
        annotator = judge(server)
        labels = annotator.label(PAIRS)
    assert [x.choice for x in labels] == ["first", "second"] * 6
    assert {(x.annotator, x.kind, x.order) for x in labels} == {("tiny-judge", "judge", "first")}
    assert len(server.requests) == 24
    for pair in PAIRS:
        asked = {(a, b) for prompt, a, b in server.shown if prompt == pair.prompt}
        assert asked == {(pair.first, pair.second), (pair.second, pair.first)}
    figures = judge_figures(annotator.judgements)
    assert figures["shown_first_wins"]["value"] == 0.5
    assert figures["consistent"]["value"] == 1.0


def test_a_judge_that_likes_what_comes_first_decides_nothing_and_is_seen_through() -> None:
    with serving(always_a) as server:
        annotator = judge(server)
        labels = annotator.label(PAIRS)
    assert {(x.choice, x.reason) for x in labels} == {("tie", "the two orders differ")}
    figures = judge_figures(annotator.judgements)
    assert figures["shown_first_wins"]["value"] == 1.0
    assert figures["consistent"]["value"] == 0.0


def test_ties_and_replies_that_cannot_be_read_are_counted() -> None:
    def odd(prompt: str, a: str, b: str) -> str:
        number = int(prompt.split()[1])
        return (
            "[[C]]"
            if number < 3
            else "They both have merit"
            if number < 5
            else prefers_longer("", a, b)
        )

    with serving(odd) as server:
        annotator = judge(server)
        choices = [x.choice for x in annotator.label(PAIRS)]
    assert choices == ["tie"] * 3 + ["skip"] * 2 + ["second", "first"] * 3 + ["second"]
    figures = judge_figures(annotator.judgements)
    assert (figures["ties"], figures["unreadable"], figures["refused"], figures["requests"]) == (
        6,
        4,
        0,
        24,
    )


def test_log_probabilities_take_out_what_the_place_alone_is_worth() -> None:
    def leans(prompt: str, a: str, b: str) -> dict[str, float]:
        # The first place is worth much, the longer answer a little.
        longer = 0.05 if len(a) > len(b) else -0.05
        return {"A": 0.6 + longer, " B": 0.2 - longer, "C": 0.1, "The": 0.1}

    with serving(leans) as server:
        by_text = judge(server)
        assert {x.choice for x in by_text.label(PAIRS)} == {"tie"}
        annotator = judge(server, read="logprobs")
        labels = annotator.label(PAIRS)
    assert [x.choice for x in labels] == ["first", "second"] * 6
    # In both orders together: (0.65 - 0.15 - (0.55 - 0.25)) / 2 of 0.9.
    assert labels[0].margin == pytest.approx((0.5 - 0.3) / 2 / 0.9)
    assert judge_figures(annotator.judgements)["shown_first_wins"]["value"] == 1.0
    assert server.requests[-1]["max_tokens"] == 1
    assert server.requests[-1]["top_logprobs"] == 20
    with serving(lambda *_: "A") as server, pytest.raises(AnnotationError, match="read=text"):
        judge(server, read="logprobs").label(PAIRS[:1])
    found = letter_probabilities({"A": math.log(0.2), " A": math.log(0.1), "B": math.log(0.3)})
    assert found == pytest.approx({"A": 0.5, "B": 0.5, "C": 0.0})
    assert letter_probabilities({"<think>": math.log(0.9), "A": math.log(0.05)}) is None
    for odd in (None, 1e5, math.nan):  # of a service that gives no log-probability
        assert letter_probabilities({"A": odd, "B": -0.7}) is None


def test_what_may_pass_is_tried_again_and_counted() -> None:
    broken = [failing(503), failing(429), failing(500), failing(408)]
    with serving(*broken, prefers_longer) as server:
        annotator = judge(server, concurrency=1)
        assert [x.choice for x in annotator.label(PAIRS[:2])] == ["first", "second"]
    assert judge_figures(annotator.judgements)["retries"] == 4
    assert len(server.requests) == 8


def test_what_will_not_pass_is_an_error_that_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with serving(prefers_longer, key="right") as server:
        with pytest.raises(AnnotationError, match=r"judge\.api_key_env=None"):
            judge(server).label(PAIRS)
        monkeypatch.setenv("JUDGE_KEY", "wrong-and-secret")
        with pytest.raises(AnnotationError, match=r"judge\.api_key_env=JUDGE_KEY") as error:
            judge(server, api_key_env="JUDGE_KEY").label(PAIRS)
        assert "secret" not in str(error.value)
        monkeypatch.setenv("JUDGE_KEY", "right")
        assert len(judge(server, api_key_env="JUDGE_KEY").label(PAIRS)) == 12
    with serving(failing(500)) as server:
        with pytest.raises(AnnotationError, match=r"out of order.*judge\.max_retries"):
            judge(server, max_retries=2, concurrency=1).label(PAIRS)
        assert len(server.requests) == 3
    nonsense = serving(lambda *_: b'{"hello": "world"}')
    with nonsense as server, pytest.raises(AnnotationError, match="no chat completion"):
        judge(server).label(PAIRS)


def test_a_reply_in_parts_is_its_text() -> None:
    def parts(*pair: str) -> list[dict[str, str]]:
        return [{"type": "text", "text": prefers_longer(*pair)}]

    with serving(parts) as server, serving(prefers_longer) as plain:
        read, wanted = (judge(one).label(PAIRS) for one in (server, plain))
    assert [label.choice for label in read] == [label.choice for label in wanted]


def test_a_refused_text_is_a_skip_and_only_refusals_are_an_error() -> None:
    def filtered(prompt: str, a: str, b: str):
        return failure(400) if prompt == "request 3" else prefers_longer(prompt, a, b)

    with serving(filtered) as server:
        annotator = judge(server)
        labels = annotator.label(PAIRS)
        assert [x.choice for x in labels].count("skip") == 1
        assert judge_figures(annotator.judgements)["refused"] == 2
    with (
        serving(failing(400)) as server,
        pytest.raises(AnnotationError, match=r"\(refused\).*out of order"),
    ):
        judge(server, concurrency=1).label(PAIRS)


def test_the_cost_is_that_of_the_tokens_and_a_limit_stops(tmp_path: Path) -> None:
    with serving(prefers_longer) as server:
        annotator = judge(server, input_price=1000.0, output_price=5000.0, concurrency=1)
        annotator.label(PAIRS)
        figures = judge_figures(annotator.judgements)
        sent = sum(completion(body, "A")["usage"]["prompt_tokens"] for body in server.requests)
        assert (figures["input_tokens"], figures["output_tokens"]) == (sent, 24)
        assert figures["cost"] == pytest.approx(sent * 1e-3 + 24 * 5e-3)
        each = figures["cost"] / 24
        limited = judge(
            server, input_price=1000.0, output_price=5000.0, concurrency=1, max_cost=4.5 * each
        )
        limited.keep_in(tmp_path / "judgements.jsonl")
        with pytest.raises(AnnotationError, match=r"max_cost=.* is reached"):
            limited.label(PAIRS)
    assert len(Journal(tmp_path / "judgements.jsonl", Judgement).read()) == 5


@pytest.mark.parametrize(
    ("reply", "cut_off", "verdict"),
    [
        ("[[A]]", False, "A"),
        ("B is bad, [[B]] is out, so [[A]].", False, "A"),
        ('{"verdict": "B"}', False, "B"),
        (' {"why": "[[A]]", "verdict": "C"}\n', False, "C"),
        ('{"verdict": "D", "why": "[[A]]"}', False, None),
        ("<think>[[B]]</think>[[A]]", False, "A"),
        ("<think>[[B]] is", False, None),
        ("[[B]] Answer A is", True, "B"),
        ("[[B]] or rather [[A]], as", True, None),
        *((text, False, None) for text in ("A", "I prefer A.", "[[A>>B]]", "", "[" * 9999)),
    ],
)  # fmt: skip
def test_a_verdict_is_json_or_the_last_letter_in_brackets(reply, cut_off, verdict) -> None:
    assert parse_verdict(reply, cut_off=cut_off) == verdict
