"""A reward that is served over HTTP, by a real server on loopback."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import socket
import ssl
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from email.utils import formatdate
from pathlib import Path

import pytest
import torch

from rlhf_lightning.batches import CONVERSATION
from rlhf_lightning.rollout.scorers.base import FunctionScorer, WeightedScorer
from rlhf_lightning.rollout.scorers.http import HttpScorer, ServiceError
from tests.builders.ranks import SimulatedRanks
from tests.builders.reward_server import (
    failing,
    hanging_up,
    lengths,
    serving,
    slow,
    trickling,
)
from tests.rollout.reward_models import text_answers

PROMPTS = ["why?", "how so?", "a"]
COMPLETIONS = ["because", "no idea", "bcd"]
SCORES = [3.0, 0.0, 2.0]
FAST = {"timeout": 5.0, "deadline": 20.0, "backoff": 0.01, "max_retries": 2}


def answers(**columns):
    return text_answers(PROMPTS, COMPLETIONS, **columns)


def scorer(url: str, **settings) -> HttpScorer:
    return HttpScorer(url=url, **(FAST | settings))


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
        return {"data": [{"reward": {"score": 1.5}}, {"reward": {"score": 2}}, {"reward": None}]}

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
        with pytest.raises(ServiceError, match=r"without 'score', there is None: name the place"):
            named(given)
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
        http = scorer(server.url, mean=1.0, std=2.0)
        both = WeightedScorer({"http": http, "one": FunctionScorer(lambda p, c: [1.0] * len(p))})
        assert both.build() == []
        scores = both(answers())
    assert scores.components["http"].tolist() == [1.0, -0.5, 0.5]
    assert scores.total.tolist() == [2.0, 0.5, 1.5]


@pytest.mark.parametrize("status", [500, 502, 503, 429])
def test_an_error_that_may_pass_is_tried_again(status):
    with serving(failing(status), failing(status), lengths) as server:
        assert scorer(server.url)(answers()).total.tolist() == SCORES
    assert len(server.requests) == 3
    assert server.requests[0] == server.requests[2]


def test_the_waits_between_attempts_double():
    with serving(failing(500), failing(500), failing(500), lengths) as server:
        scorer(server.url, backoff=0.2, max_retries=3)(answers())
    waits = [b - a for a, b in zip(server.times, server.times[1:], strict=False)]
    for wait, longest in zip(waits, (0.2, 0.4, 0.8), strict=True):
        assert wait >= longest / 2, "the jitter takes at most half of it away"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("pause", "seconds"), [("1", 1.0), ("0.4", 0.4), (" 0.4 ", 0.4), ("date", 0.9), ("soon", 0.0)]
)
@pytest.mark.parametrize("status", [429, 503])
def test_a_server_that_says_how_long_to_wait_is_waited_for(pause, seconds, status):
    asked = formatdate(time.time() + 2, usegmt=True) if pause == "date" else pause
    with serving(failing(status, Retry_After=asked), lengths) as server:
        scorer(server.url)(answers())
    assert seconds <= server.times[1] - server.times[0] < 3


def test_a_connection_that_breaks_is_tried_again():
    with serving(hanging_up, lengths) as server:
        assert scorer(server.url)(answers()).total.tolist() == SCORES


def test_a_service_that_always_fails_is_an_error_that_says_what_to_do():
    with serving(failing(500, "no memory  left")) as server, pytest.raises(ServiceError) as caught:
        scorer(server.url)(answers())
    message = str(caught.value)
    assert message.startswith(f"{server.url} did not answer: HTTP 500: 'no memory left' (3 ")
    assert "scorer.timeout" in message
    assert len(server.requests) == 3


def test_a_service_that_is_not_there_is_an_error_that_says_what_to_do():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/score"
    with pytest.raises(ServiceError, match=rf"{url} did not answer: ConnectionRefused.*3 attempts"):
        scorer(url)(answers())


@pytest.mark.parametrize("late", [slow(20), trickling])
def test_an_answer_that_takes_too_long_is_a_time_out(late):
    started = time.monotonic()
    with serving(late) as server:
        with pytest.raises(ServiceError, match=r"no reply within 0\.2 s \(2 attempts"):
            scorer(server.url, timeout=0.2, max_retries=1)(answers())
        assert time.monotonic() - started < 5
        assert len(server.requests) == 2


def test_an_attempt_that_timed_out_is_tried_again():
    with serving(slow(20), lengths) as server:
        assert scorer(server.url, timeout=1.5)(answers()).total.tolist() == SCORES


@pytest.mark.parametrize("behaviour", [failing(503), slow(20), trickling])
def test_the_deadline_bounds_all_attempts_together(behaviour):
    settings = {"deadline": 0.5, "timeout": 0.2, "max_retries": 1000, "backoff": 0.05}
    started = time.monotonic()
    with serving(behaviour) as server, pytest.raises(ServiceError, match="did not answer"):
        scorer(server.url, **settings)(answers())
    assert 0.2 < time.monotonic() - started < 5


def test_a_batch_that_fails_is_not_hidden_by_one_that_is_still_tried():
    def behaviour(body):
        return failing(400)(body) if "a" in body["prompts"] else failing(503)(body)

    started = time.monotonic()
    with serving(behaviour) as server, pytest.raises(ServiceError, match="HTTP 400"):
        scorer(server.url, batch_size=1, max_retries=50, backoff=1.0)(answers())
    assert time.monotonic() - started < 15


def test_the_token_comes_from_the_environment_and_is_never_shown(monkeypatch):
    monkeypatch.setenv("REWARD_TOKEN", " s3cret\n")
    with serving(lengths, failing(403, "the token s3cret is old")) as server:
        http = scorer(server.url, token_env="REWARD_TOKEN")
        assert http(answers()).total.tolist() == SCORES
        with pytest.raises(ServiceError, match=r"'the token \*\*\* is old'.*variable REWARD_TOKEN"):
            http(answers())
    assert [h["Authorization"] for h in server.headers] == ["Bearer s3cret"] * 2


def test_a_column_that_the_prompts_do_not_have_is_an_error():
    with pytest.raises(ValueError, match=r"scorer.request.gold=gold is not there: use one of \["):
        scorer("http://127.0.0.1:1/", request={"gold": "gold"})(answers())


@pytest.mark.parametrize("variable", ["HTTP_PROXY", "http_proxy", "ALL_PROXY"])
def test_the_service_is_asked_directly_whatever_proxy_and_passwords_the_machine_names(
    tmp_path, monkeypatch, variable
):
    monkeypatch.setenv(variable, "http://127.0.0.1:9")
    passwords = tmp_path / "netrc"
    passwords.write_text("machine 127.0.0.1 login me password s3cret\n")
    passwords.chmod(0o600)
    monkeypatch.setenv("NETRC", str(passwords))
    with serving(lengths) as server:
        assert scorer(server.url, max_retries=0)(answers()).total.tolist() == SCORES
    assert "Authorization" not in server.headers[0]


def test_a_proxy_that_is_not_used_is_named_where_the_service_is_not_reached(monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    with pytest.raises(ServiceError, match="HTTP_PROXY of the environment is not used"):
        scorer("http://127.0.0.1:1/", max_retries=0)(answers())


def test_a_service_is_asked_from_a_running_event_loop_such_as_a_notebooks():
    async def cell():
        return scorer(server.url)(answers()).total.tolist()

    with serving(lengths) as server:
        assert asyncio.run(cell()) == SCORES


def test_headers_that_trickle_are_a_time_out():
    def behaviour(body):
        def write(handler):
            handler.wfile.write(b"HTTP/1.0 200 OK\r\n")
            for _ in range(100):
                handler.wfile.write(b"X-Slow: 1\r\n")
                handler.wfile.flush()
                time.sleep(0.05)

        return write

    started = time.monotonic()
    with (
        serving(behaviour) as server,
        pytest.raises(ServiceError, match=r"no reply within 0\.2 s \(1 att"),
    ):
        scorer(server.url, timeout=0.2, max_retries=0)(answers())
    assert time.monotonic() - started < 4


@pytest.mark.slow
def test_an_interrupt_does_not_wait_for_a_service():
    program = (
        "import os, signal, sys, threading, time\n"
        "from tests.rollout.test_score_http import answers, scorer\n"
        "http = scorer(sys.argv[1], timeout=60, deadline=60)\n"
        "given = answers()\n"
        "threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGINT]).start()\n"
        "started = time.monotonic()\n"
        "try:\n"
        "    http(given)\n"
        "except KeyboardInterrupt:\n"
        "    print(time.monotonic() - started)\n"
    )
    with serving(slow(30)) as server:
        started = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-c", program, server.url], capture_output=True, text=True, timeout=60
        )
        assert time.monotonic() - started < 25, "it ended before the service answered"
    assert 0.4 < float(done.stdout) < 10, done.stderr


def certificate(folder: Path) -> tuple[Path, Path]:
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    command += ["-days", "2", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    return key, certificate


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")
def test_a_certificate_is_checked_and_one_that_is_not_trusted_is_not_tried_again(
    tmp_path, monkeypatch
):
    key, cert = certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    with serving(lengths) as server:
        server.http.socket = context.wrap_socket(server.http.socket, server_side=True)
        url = server.url.replace("http://127.0.0.1", "https://localhost")
        with pytest.raises(ServiceError, match=r"certificate is not trusted .*SSL_CERT_FILE"):
            scorer(url)(answers())
        monkeypatch.setenv("SSL_CERT_FILE", str(cert))
        assert scorer(url)(answers()).total.tolist() == SCORES
    assert len(server.requests) == 1


def test_retries_draw_nothing_from_the_global_random_state():
    # It is in the checkpoint: a network error must not change the run behind it.
    before = random.getstate()
    with serving(failing(500), lengths) as server:
        scorer(server.url)(answers())
    assert random.getstate() == before


def test_ranks_ask_for_their_own_rows_and_fail_together(monkeypatch):
    def behaviour(body):
        return failing(400, "bad")(body) if "rank 1" in body["completions"] else lengths(body)

    ranks = SimulatedRanks(monkeypatch, 2)
    with serving(behaviour) as server:
        http = [scorer(server.url) for _ in range(2)]

        def one(rank: int) -> list[str]:
            good = http[rank](text_answers(["p"], [f"good {rank}"])).total.tolist()
            assert good == [5.0]
            with pytest.raises(ServiceError) as caught:
                http[rank](text_answers(["p"], [f"rank {rank}"]))
            return [str(caught.value)]

        (first,), (second,) = ranks.run(one)
    assert "another rank got no scores from" in first
    assert "HTTP 400: 'bad'" in second
    assert len(server.requests) == 4


def test_several_scorers_may_ask_at_the_same_time():
    with serving(slow(0.02)) as server:
        http = scorer(server.url, batch_size=1)
        with ThreadPoolExecutor(4) as pool:
            results = list(pool.map(lambda _: http(answers()).total.tolist(), range(4)))
    assert results == [SCORES] * 4
