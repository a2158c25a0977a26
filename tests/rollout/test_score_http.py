"""A reward that is served over HTTP, by a real server on loopback."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from rlhf_lightning.rollout.scorers import http
from rlhf_lightning.rollout.scorers.base import FunctionScorer, WeightedScorer
from rlhf_lightning.rollout.scorers.http import HttpScorer, ServiceError
from rlhf_lightning.text.messages import CONVERSATION
from tests.builders.ranks import SimulatedRanks
from tests.builders.reward_server import failing, hanging_up, lengths, serving, slow
from tests.rollout.reward_models import text_answers

PROMPTS = ["why?", "how so?", "a"]
COMPLETIONS = ["because", "no idea", "bcd"]
SCORES = [3.0, 0.0, 2.0]


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(http, "FIRST_WAIT", 0.02)


def answers(**columns):
    return text_answers(PROMPTS, COMPLETIONS, **columns)


def scorer(url: str, **settings) -> HttpScorer:
    return HttpScorer(url=url, **({"timeout": 5.0, "max_retries": 2} | settings))


def test_texts_go_in_and_numbers_come_out_in_their_order():
    with serving(lengths) as server:
        scores = scorer(server.url + "?v=2")(answers())
    assert server.requests == [{"prompts": PROMPTS, "completions": COMPLETIONS}]
    assert server.paths == ["/score?v=2"]
    assert server.headers[0]["Content-Type"] == "application/json"
    assert "Authorization" not in server.headers[0]
    assert scores.total.tolist() == SCORES
    assert scores.total.dtype == torch.float32
    assert set(scores.components) == {"http"}


@pytest.mark.parametrize(
    ("thoughts", "sent"), [({}, "b"), ({"thoughts": "keep"}, "<think>a</think>b")]
)
def test_thoughts_are_sent_only_if_they_are_kept(thoughts, sent):
    with serving(lengths) as server:
        scorer(server.url, **thoughts)(text_answers(["p"], ["<think>a</think>b"]))
    assert server.requests == [{"prompts": ["p"], "completions": [sent]}]


def test_batches_are_asked_for_at_once_but_not_too_many_and_keep_their_order():
    prompts = ["p" * (i % 5) for i in range(23)]
    completions = ["c" * i for i in range(23)]
    with serving(slow(0.05)) as server:
        scores = scorer(server.url, batch_size=2, concurrency=3)(text_answers(prompts, completions))
    assert scores.total.tolist() == [float(i - i % 5) for i in range(23)]
    assert sorted(len(request["prompts"]) for request in server.requests) == [1] + [2] * 11
    assert 2 <= server.most_at_once <= 3


def test_what_is_sent_and_where_scores_stand_can_be_named():
    def rewards(body):
        return {"data": [{"reward": {"score": value}} for value in (1.5, 2, -1)]}

    columns = {
        "answer": ["x", "y", "z"],
        CONVERSATION: [json.dumps([{"role": "user", "content": "hi"}]), "", ""],
    }
    request = {"query": "texts", "labels": "answer", "chat": "messages", "done": "finished"}
    with serving(rewards) as server:
        named = scorer(
            server.url, request=request, response="data.reward.score", extra={"model": {"n": [1]}}
        )
        given = text_answers(PROMPTS, COMPLETIONS, finished=[True, False, True], **columns)
        assert named(given).total.tolist() == [1.5, 2.0, -1.0]
    (body,) = server.requests
    assert body["query"] == ["why?because", "how so?no idea", "abcd"]
    assert body["labels"] == ["x", "y", "z"]
    assert body["done"] == [True, False, True]
    assert body["model"] == {"n": [1]}
    assert body["chat"][0] == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "because"},
    ]
    assert body["chat"][1][0] == {"role": "user", "content": "how so?"}
    with serving(lambda body: [0.5, 1, -2e3]) as server:
        bare = scorer(server.url, response="")(answers())
    assert bare.total.tolist() == [0.5, 1.0, -2000.0]


def test_scores_are_shifted_and_scaled_and_can_be_part_of_a_sum():
    with serving(lengths) as server:
        served = scorer(server.url, mean=1.0, std=2.0)
        one = FunctionScorer(lambda completions: [1.0] * len(completions))
        both = WeightedScorer({"http": served, "one": one})
        assert both.build() == []
        scores = both(answers())
    assert scores.components["http"].tolist() == [1.0, -0.5, 0.5]
    assert scores.total.tolist() == [2.0, 0.5, 1.5]


@pytest.mark.parametrize("trouble", [failing(503), failing(429), hanging_up])
def test_what_may_pass_is_tried_again_after_waits_that_double(trouble):
    # The random state is in the checkpoint: a network error must not change the run behind it.
    before = random.getstate()
    with serving(trouble, trouble, lengths) as server:
        assert scorer(server.url)(answers()).total.tolist() == SCORES
    assert server.requests[0] == server.requests[2]
    first, second = server.times[1] - server.times[0], server.times[2] - server.times[1]
    assert first >= 0.02
    assert second >= 0.04
    assert random.getstate() == before


def test_an_attempt_that_times_out_is_tried_again_and_a_service_that_is_not_there_is_named():
    with serving(slow(5), lengths) as server:
        assert scorer(server.url, timeout=0.5)(answers()).total.tolist() == SCORES
    never = pytest.raises(ServiceError, match="did not answer: ReadTimeout")
    with serving(slow(5)) as server, never:
        scorer(server.url, timeout=0.2, max_retries=1)(answers())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/score"
    with pytest.raises(ServiceError, match=rf"{url} did not answer: ConnectError.*3 attempts"):
        scorer(url)(answers())


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (lambda body: {"scores": [1.0, 2.0]}, r"returned .* for 3 .*response=scores"),
        (lambda body: {"scores": 1.0}, "for 3 responses"),
        (lambda body: {"rewards": [1, 2, 3]}, "scorer.response=scores"),
        (lambda body: {"scores": [1, float("nan"), 2]}, "finite"),
        (lambda body: {"scores": [1e39, 1, 2]}, "finite"),
        (lambda body: {"scores": ["1", 2, 3]}, "finite"),
        (lambda body: {"scores": [True, 2, 3]}, "finite"),
        (failing(200, "<html>hello</html>"), "'<html>hello</html>', which is no JSON"),
        (failing(400, "no\nprompts"), r"HTTP 400 'no prompts': check .*scorer\.url"),
        (failing(401), "scorer.token_env"),
        (failing(302, "", Location="http://127.0.0.1:9/"), "HTTP 302"),
    ],
)
def test_a_reply_that_cannot_be_used_is_an_error_at_once_in_one_line(reply, message):
    with serving(reply) as server:
        with pytest.raises(ServiceError, match=message) as caught:
            scorer(server.url)(answers())
        assert server.url in str(caught.value)
    assert len(server.requests) == 1
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_a_batch_that_fails_ends_what_was_not_asked_yet():
    with serving(failing(400)) as server, pytest.raises(ServiceError, match="HTTP 400"):
        scorer(server.url, batch_size=1, concurrency=1)(answers())
    assert len(server.requests) < 3


def test_the_token_comes_from_the_environment(monkeypatch):
    monkeypatch.setenv("REWARD_TOKEN", " s3cret\n")
    with serving(lengths) as server:
        scorer(server.url, token_env="REWARD_TOKEN")(answers())
    assert server.headers[0]["Authorization"] == "Bearer s3cret"
    for value in ("", " ", "schlüssel"):
        monkeypatch.setenv("REWARD_TOKEN", value)
        with pytest.raises(ValueError, match="token_env=REWARD_TOKEN"):
            scorer(server.url, token_env="REWARD_TOKEN")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"url": "http://me:pw@h/"}, "credentials for h"),
        ({"request": {}}, "request"),
        ({"extra": {"prompts": 1}}, "prompts"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, message):
    with pytest.raises(ValueError, match=message) as caught:
        HttpScorer(**({"url": "http://127.0.0.1:1/"} | settings))
    assert "pw" not in str(caught.value)


def test_a_column_that_the_prompts_do_not_have_is_an_error():
    with pytest.raises(ValueError, match=r"scorer.request.gold=gold"):
        scorer("http://127.0.0.1:1/", request={"gold": "gold"})(answers())


def test_the_service_is_asked_directly_whatever_proxy_the_machine_names(monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    with serving(lengths) as server:
        assert scorer(server.url, max_retries=0)(answers()).total.tolist() == SCORES


def test_a_service_is_asked_from_a_running_event_loop_and_from_threads():
    async def cell():
        return scorer(server.url)(answers()).total.tolist()

    with serving(lengths) as server, ThreadPoolExecutor(4) as pool:
        assert asyncio.run(cell()) == SCORES
        served = scorer(server.url, batch_size=1)
        results = list(pool.map(lambda _: served(answers()).total.tolist(), range(4)))
    assert results == [SCORES] * 4


def test_ranks_ask_for_their_own_rows_and_fail_together(monkeypatch):
    def behaviour(body):
        return failing(400, "bad")(body) if "rank 1" in body["completions"] else lengths(body)

    ranks = SimulatedRanks(monkeypatch, 2)
    with serving(behaviour) as server:
        served = [scorer(server.url) for _ in range(2)]

        def one(rank: int) -> list[str]:
            good = served[rank](text_answers(["p"], [f"good {rank}"])).total.tolist()
            assert good == [5.0]
            with pytest.raises(ServiceError) as caught:
                served[rank](text_answers(["p"], [f"rank {rank}"]))
            return [str(caught.value)]

        (first,), (second,) = ranks.run(one)
    assert "another rank got no scores from" in first
    assert "HTTP 400 'bad'" in second
    assert len(server.requests) == 4
