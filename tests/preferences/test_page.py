"""Who is let in and what is refused, asked over HTTP of a real server process."""

from __future__ import annotations

import http.client
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.builders.labels import make_pairs
from tests.builders.ranks import free_port
from tests.preferences.page_server import Client, Server, answer_form, serving


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("page"), make_pairs(40)) as running:
        yield running


@pytest.mark.parametrize(
    "host", ["evil.test", "evil.test:80", "127.0.0.1.evil.test", "", "a@127.0.0.1", "192.168.1.5"]
)
def test_a_foreign_host_is_refused_before_anything_is_shown(server: Server, host: str):
    reply = Client(server.url).get(f"/?{urlsplit(server.url).query}", Host=host)
    assert (reply.status, "Set-Cookie" in reply.headers) == (421, False)
    assert host not in reply.text or not host


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "LOCALHOST:9999", "[::1]:8000"])
def test_this_machine_is_let_in_by_each_of_its_names(server: Server, host: str):
    client = Client(server.url)
    client.sign_in("Ann")
    assert client.get(Host=host).status == 200


def test_nobody_gets_in_without_the_token(server: Server):
    client = Client(server.url)
    for path in ("/", "/?token=", "/?token=wrong", "/?token=%C3%A9", "/static/page.js"):
        reply = client.get(path)
        assert (reply.status, "Set-Cookie" in reply.headers) == (403, False)
    assert client.post("/start", {"name": "Eve"}).status == 403
    client.cookies = {f"token_{urlsplit(server.url).port}": "wrong"}
    assert client.post("/label", {"pair": "x", "answer": "tie"}).status == 403
    assert server.labels() == []


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.test"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
        {"Sec_Fetch_Site": "cross-site"},
    ],
)
def test_a_form_of_another_site_is_refused_even_with_cookies(server: Server, headers):
    client = Client(server.url)
    page = client.sign_in("Ann").text
    for path in ("/label", "/undo", "/leave", "/start"):
        reply = client.post(path, answer_form(page, "tie"), **headers)
        assert (reply.status, "Set-Cookie" in reply.headers) == (403, False)
    assert server.labels() == []


def test_every_answer_carries_a_strict_policy_and_nothing_is_loaded_from_elsewhere(server: Server):
    client = Client(server.url)
    page = client.sign_in("Ann").text
    assert page.count("<script") == 1
    for bad in ("style=", "<style", "onclick", "javascript:", "http://", "https://", "//cdn"):
        assert bad not in page
    for reply in (client.get(), client.get("/static/page.css"), client.get(Host="evil.test")):
        policy = reply.headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert reply.headers["X-Content-Type-Options"] == "nosniff"
        assert "server" not in {key.lower() for key in reply.headers}


@pytest.mark.parametrize(
    ("form", "status"),
    [({"answer": "purple"}, 400), ({"answer": "second"}, 400), ({"pair": "x"}, 503)],
)
def test_a_form_that_makes_no_sense_changes_nothing(server: Server, form, status):
    client = Client(server.url)
    page = client.sign_in("Ann").text
    assert client.post("/label", answer_form(page, "tie") | form).status == status
    assert server.labels() == []
    for path in ("/<script>", "/static/../page.py", "/static/%2e%2e/page.py", "/label"):
        reply = client.get(path)
        assert (reply.status, "<script>" in reply.text) == (405 if path == "/label" else 404, False)


def test_a_rater_who_is_not_signed_in_labels_nothing(server: Server):
    client = Client(server.url)
    page = client.sign_in("Ann").text
    client.post("/leave", {})
    client.cookies = {key: value for key, value in client.cookies.items() if value != '""'}
    assert client.post("/label", answer_form(page, "tie")).status == 400
    assert 'id="name"' in client.get().text
    assert "1 to 60" in client.sign_in("x" * 61).text


def test_left_and_right_mean_the_pair_wherever_it_was_shown(server: Server):
    pairs = {pair.pair_id: pair for pair in make_pairs(40)}
    client = Client(server.url)
    page, better = client.sign_in("Lea").text, []
    for number in range(12):
        texts = re.findall(r'<div class="free" dir="auto">(.*?)</div>', page)
        better.append(texts[number % 2])
        page = client.answer(page, ("left", "right")[number % 2]).text
    found = list(server.labels())  # the tests above leave none
    chosen = [getattr(pairs[x.pair_id], x.choice) for x in found]
    assert chosen == better
    assert {x.order for x in found} == {"first", "second"}


@pytest.mark.thorough
@pytest.mark.timeout(400)
def test_no_confirmed_label_is_lost_when_the_server_is_killed_under_its_raters(tmp_path: Path):
    port, end = free_port(), threading.Event()
    confirmed: list[tuple[str, str]] = []

    def rate(url: str, name: str) -> None:
        client, page = Client(url), ""
        while not end.is_set():
            try:
                page = page or client.sign_in(name).text
                form = answer_form(page, "tie")
                if client.post("/label", form).status == 303:
                    confirmed.append((name, form["pair"]))
                page = client.get().text
            except (OSError, http.client.HTTPException):
                time.sleep(0.1)
                client, page = Client(url), ""

    try:
        for most in (40, 80):
            words = (make_pairs(500), "labels_per_pair=2") if most == 40 else ()
            with serving(tmp_path, *words, port=port) as server:
                for number in range(4) if most == 40 else ():
                    task = server.url, f"rater {number}"
                    threading.Thread(target=rate, args=task, daemon=True).start()
                while len(confirmed) < most:
                    time.sleep(0.05)
                server.kill()
    finally:
        end.set()
    kept = [(x.annotator, x.pair_id) for x in server.labels()]
    assert set(confirmed) <= set(kept)
    assert len(kept) == len(set(kept))
