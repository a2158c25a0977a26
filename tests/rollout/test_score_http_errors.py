"""A reward service whose answers cannot be used, and settings that cannot work."""

from __future__ import annotations

import gzip
import json
import tracemalloc

import pytest

from rlhf_lightning.rollout.scorers.http import MOST_BYTES, HttpScorer, ServiceError
from tests.builders.reward_server import failing, serving
from tests.rollout.test_score_http import answers, scorer


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (
            lambda body: {"scores": [1.0, 2.0]},
            r"returned 2 scores for 3 responses: .* under scores",
        ),
        (lambda body: {"scores": [1.0] * 4}, r"returned 4 scores for 3 responses"),
        (lambda body: {"scores": 1.0}, r"returned float for 3 responses"),
        (lambda body: {"rewards": [1, 2, 3]}, r"without 'scores', there is the keys \['rewards'\]"),
        (lambda body: [1, 2, 3], r"without 'scores', there is 1: name the place of the scores"),
        (lambda body: {"scores": [1, float("nan"), 2]}, r"returned nan as the score of response 1"),
        (lambda body: {"scores": [float("inf")] * 3}, r"returned inf as the score of response 0"),
        (lambda body: {"scores": [1, 2, 10**400]}, r"as the score of response 2: .* finite"),
        (lambda body: {"scores": [1e39, 1, 2]}, r"returned 1e\+39 as .*response 0: .*float32"),
        (lambda body: {"scores": [1, 2, -(10**39)]}, r"as the score of response 2: .*float32"),
        (lambda body: {"scores": ["1", 2, 3]}, r"returned '1' as the score of response 0"),
        (lambda body: {"scores": [True, 2, 3]}, r"returned True as the score of response 0"),
        (lambda body: {"scores": [[1], 2, 3]}, r"returned \[1\] as the score of response 0"),
        (failing(200, "<html>hello</html>"), r"too deep: '<html>hello</html>'.*path that scores"),
        (failing(200, ""), r"too deep: ''"),
        (failing(400, "no prompts"), r"HTTP 400: 'no prompts'\. Check scorer\.url"),
        (failing(404), r"HTTP 404: 'out of order'\. Check scorer\.url"),
        (failing(401), r"HTTP 401: .* holds its token with scorer\.token_env"),
        (failing(413), r"HTTP 413: .*Lower scorer\.batch_size"),
        (failing(302, "", Location="http://127.0.0.1:9/"), r"HTTP 302: .*It redirects"),
    ],
)
def test_an_answer_that_cannot_be_used_is_an_error_at_once(reply, message):
    with serving(reply) as server:
        with pytest.raises(ServiceError, match=message) as caught:
            scorer(server.url)(answers())
        assert server.url in str(caught.value)
    assert len(server.requests) == 1


def test_the_row_of_a_bad_score_is_that_of_the_whole_call():
    def behaviour(body):
        return {"scores": [None if p == "a" else 1.0 for p in body["prompts"]]}

    with serving(behaviour) as server, pytest.raises(ServiceError, match=r"None .* of response 2"):
        scorer(server.url, batch_size=2)(answers())


@pytest.mark.parametrize("value", [None, "", "  ", "a\nb", "schlüssel"])
def test_a_token_that_is_not_there_is_an_error_before_anything_is_asked(monkeypatch, value):
    if value is None:
        monkeypatch.delenv("REWARD_TOKEN", raising=False)
    else:
        monkeypatch.setenv("REWARD_TOKEN", value)
    with pytest.raises(ValueError, match=r"token_env=REWARD_TOKEN: .* no key") as caught:
        scorer("http://127.0.0.1:1/", token_env="REWARD_TOKEN")
    assert not (value or "").strip() or value not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"url": "ftp://x/y"}, "must be http://HOST"),
        ({"url": "localhost:8000"}, "must be http://HOST"),
        ({"url": "http://me:pw@h/"}, "holds credentials for h: leave them out"),
        ({"request": {}}, "scorer.request is empty"),
        ({"extra": {"prompts": 1}}, r"both have \['prompts'\]"),
        ({"batch_size": 0}, "batch_size=0 must be >= 1"),
        ({"timeout": 0}, "timeout=0 must be > 0"),
        ({"std": 0.0}, "std=0.0 must be > 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, message):
    with pytest.raises(ValueError, match=message) as caught:
        HttpScorer(**({"url": "http://127.0.0.1:1/"} | settings))
    assert "pw" not in str(caught.value)


DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (failing(200, DEEP), r"too deep: '\[\[\["),
        (
            failing(200, '{"scores": [' + "[" * 400 + "]" * 400 + ", 1, 2]}"),
            r"too deep: '\{",
        ),
        (failing(200, '{"data": ' + "[" * 400 + "]" * 400 + "}"), r"too deep: '\{"),
        (
            failing(200, '{"scores": "' + "x" * MOST_BYTES + '"}'),
            r"more than 32 MiB: .*'\{\"scores",
        ),
        (failing(200, '{"scores": ["' + "x" * 10**6 + '", 1, 2]}'), "of response 0"),
        (lambda body: {f"key {n}": n for n in range(10_000)}, "without 'scores'"),
        (failing(503, "x" * (MOST_BYTES + 1)), "more than 32 MiB"),
    ],
)
def test_an_answer_that_is_too_deep_or_too_long_is_an_error_at_once(reply, message):
    with serving(reply) as server, pytest.raises(ServiceError, match=message) as caught:
        scorer(server.url)(answers())
    assert len(str(caught.value)) < 1000
    assert len(server.requests) == 1


def test_an_answer_without_an_end_is_read_to_the_limit():
    def endless(handler):
        handler.send_response(200)
        handler.end_headers()
        while True:
            handler.wfile.write(b"[" * 2**20)

    with serving(lambda body: endless) as server, pytest.raises(ServiceError, match="than 32 MiB"):
        scorer(server.url, timeout=60)(answers())


@pytest.mark.parametrize(("times", "message"), [(1, "more than 32 MiB"), (2, "no JSON")])
def test_a_small_reply_that_unpacks_to_gigabytes_is_not_unpacked(times, message):
    body = b"0" * 2**30
    for _ in range(times):
        body = gzip.compress(body)
    headers = {"Content-Encoding": ", ".join(["gzip"] * times)}
    tracemalloc.start()
    try:
        with serving(lambda _: (200, body, headers)) as server:
            tracemalloc.reset_peak()
            with pytest.raises(ServiceError, match=message):
                scorer(server.url, timeout=60)(answers())
            assert tracemalloc.get_traced_memory()[1] < 2**28
    finally:
        tracemalloc.stop()


def test_a_reply_that_is_packed_once_is_read():
    body = gzip.compress(json.dumps({"scores": [1.0, 2.0, 3.0]}).encode())
    with serving(lambda _: (200, body, {"Content-Encoding": "gzip"})) as server:
        assert scorer(server.url)(answers()).total.tolist() == [1.0, 2.0, 3.0]
    assert server.headers[0]["Accept-Encoding"] == "gzip"


def test_a_token_that_a_service_sends_back_is_not_told(monkeypatch):
    monkeypatch.setenv("REWARD_TOKEN", "token-of-this-service")
    for reply in (["token-of-this-service", 1, 2], {"token-of-this-service": 1}):
        ends = pytest.raises(ServiceError, match="returned")
        with serving(lambda body, reply=reply: {"scores": reply}) as server, ends as caught:
            scorer(server.url, token_env="REWARD_TOKEN")(answers())
        assert "token-of" not in str(caught.value)
