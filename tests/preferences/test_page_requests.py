"""Who is let in and what is refused, asked over HTTP of a real server process."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from pathlib import Path

import pytest

from rlhf_lightning.preferences.annotation.server.security import host_name
from rlhf_lightning.preferences.annotation.server.settings import PageSettings
from tests.builders.labels import make_pairs
from tests.preferences.page_server import Client, Server, csrf_token_of, serving

TOKEN = "a token of the tests, nobody's"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("page"), make_pairs(40)) as running:
        yield running


def note_of(page: str) -> str:
    found = re.search(r'id="note">([^<]*)<', page)
    assert found is not None, page
    return found.group(1)


def test_who_signs_in_under_a_name_that_is_there_is_told_whose_it_is(tmp_path: Path):
    with serving(tmp_path, make_pairs(3)) as server:
        first = Client(server.url)
        page = first.sign_in("Ann Lee").text
        assert note_of(page) == ""
        again = Client(server.url).sign_in("Ann Lee").text
        assert note_of(again).startswith("Signed in as Ann Lee, who has 0 labels so far. If you")
        first.answer(page, "tie")
        for name in ("ann  lee", "ANN LEE "):
            told = note_of(Client(server.url).sign_in(name).text)
            assert told.startswith(
                "Signed in as Ann Lee, who has 1 label so far. If you are another"
            )


def test_of_two_who_share_a_name_the_second_reads_that_the_answer_was_not_kept(tmp_path: Path):
    with serving(tmp_path, make_pairs(2)) as server:
        clients = Client(server.url), Client(server.url)
        pages = [
            client.sign_in(name).text for client, name in zip(clients, ("Ann", "ann"), strict=True)
        ]
        assert "Not kept" not in clients[0].answer_at_once(pages[0], "tie").text
        told = note_of(clients[1].answer_at_once(pages[1], "both_bad").text)
        assert told.startswith("Not kept: as Ann you had given another answer to that pair")
        assert note_of(clients[1].answer_at_once(pages[1], "tie").text) == (
            "That answer had arrived already."
        )
        assert [label.choice for label in server.labels()] == ["tie"]


@pytest.mark.thorough
def test_a_server_that_nobody_asks_sleeps(server: Server):
    Client(server.url).get()
    before = wake_ups(server.process.pid)
    time.sleep(2)
    assert wake_ups(server.process.pid) - before <= 4  # it was 20: ten a second
    assert abs(as_time(Client(server.url).get().headers["Date"]) - time.time()) < 3


def wake_ups(pid: int) -> int:
    """Return how often the threads of a process have gone to sleep."""
    tasks = Path(f"/proc/{pid}/task").glob("*/status")
    lines = [line for task in tasks for line in task.read_text().splitlines()]
    return sum(int(x.split()[1]) for x in lines if x.startswith("voluntary_ctxt_switches"))


def as_time(date: str) -> float:
    return parsedate_to_datetime(date).timestamp()


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that asks for a token, and may be called by one more name."""
    folder = tmp_path_factory.mktemp("guarded")
    hosts = "page.hosts=[Lab.test]"
    with serving(folder, make_pairs(3), hosts, token=TOKEN) as running:
        yield running


@pytest.mark.parametrize(
    "host", ["evil.test", "evil.test:80", "127.0.0.1.evil.test", "", "lab.test", "a@127.0.0.1"]
)
def test_a_foreign_host_is_refused_before_anything_is_shown(server: Server, host: str):
    reply = Client(server.url).get(Host=host)
    assert reply.status == 421
    assert "not served under that name" in reply.text
    assert "Set-Cookie" not in reply.headers
    assert host not in reply.text or not host


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "LOCALHOST:9999", "[::1]:8000"])
def test_this_machine_is_let_in_by_each_of_its_names(server: Server, host: str):
    assert Client(server.url).get(Host=host).status == 200


def test_a_further_name_is_let_in_where_it_was_given(guarded: Server):
    assert Client(guarded.url).get(Host="lab.test").status == 200
    assert Client(guarded.url).get(Host="evil.test").status == 421


def test_every_answer_carries_a_strict_policy(server: Server):
    client = Client(server.url)
    for reply in (client.get(), client.get("/static/page.css"), client.get(Host="evil.test")):
        policy = reply.headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert reply.headers["X-Content-Type-Options"] == "nosniff"
        assert "server" not in {key.lower() for key in reply.headers}


def test_the_page_has_no_inline_script_or_style_and_nothing_from_elsewhere(server: Server):
    client = Client(server.url)
    for page in (client.get().text, client.sign_in("Ann").text):
        assert page.count("<script") == 1
        for bad in ("style=", "<style", "onclick", "javascript:", "http://", "https://", "//cdn"):
            assert bad not in page


def test_a_label_without_signing_in_is_refused(server: Server):
    client = Client(server.url)
    word = csrf_token_of(client.get().text)
    form = {"csrf_token": word, "assignment": "1", "answer": "left"}
    assert client.post("/label", form).status == 403
    assert client.post("/undo", {"csrf_token": word}).status == 403


def test_a_form_needs_its_own_csrf_token_and_not_that_of_another(
    server: Server,
):
    ann, bob = Client(server.url), Client(server.url)
    page = ann.sign_in("Ann of the words").text
    theirs = csrf_token_of(bob.sign_in("Bob").text)
    for word in ("", "0" * 64, theirs, "\u00e9"):
        for path in ("/label", "/undo", "/leave", "/start"):
            form = {"csrf_token": word, "assignment": "1", "answer": "left", "name": "Eve"}
            assert ann.post(path, form).status == 403
    assert server.labels() == []
    assert ann.get().text == page


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.test"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
        {"Sec_Fetch_Site": "cross-site"},
    ],
)
def test_a_form_of_another_site_is_refused_even_with_cookies_and_token(server: Server, headers):
    client = Client(server.url)
    page = client.sign_in("Ann").text
    reply = client.post("/undo", {"csrf_token": csrf_token_of(page)}, **headers)
    assert (reply.status, reply.text) == (403, "A form of another site was refused.\n")


def test_a_forged_cookie_signs_nobody_in(server: Server):
    ann, eve = Client(server.url), Client(server.url)
    ann.sign_in("Ann")
    eve.sign_in("Eve")
    (visit,) = (key for key in ann.cookies if key.startswith("visit"))
    (rater,) = (key for key in ann.cookies if key.startswith("rater"))
    number, _, signature = ann.cookies[rater].partition(".")
    for forged in (ann.cookies[rater], f"{number}.{'0' * 64}", f"{int(number) + 1}.{signature}"):
        eve.cookies[rater] = forged
        assert 'id="name"' in eve.get().text, "the start page, not Ann's"
    eve.cookies = {visit: ann.cookies[visit], rater: ann.cookies[rater]}
    assert 'class="rater">Ann<' in eve.get().text, "the same browser is the same rater"


@pytest.mark.parametrize(
    ("form", "status"),
    [
        ({"answer": "purple", "assignment": "1"}, 400),
        ({"answer": "left", "assignment": "one"}, 400),
        ({"answer": "left", "assignment": "\u0661"}, 400),
        ({"answer": "left", "assignment": "9" * 400}, 303),
        ({"answer": "left", "assignment": "1", "reason": "x" * 70_000}, 413),
        ({str(n): "" for n in range(30)}, 400),
    ],
)
def test_a_form_that_makes_no_sense_is_refused_and_changes_nothing(server: Server, form, status):
    client = Client(server.url)
    page = client.sign_in("Ann").text
    assert client.post("/label", {"csrf_token": csrf_token_of(page)} | form).status == status
    assert server.labels() == []
    assert client.get().status == 200


def test_what_is_not_there_is_told_without_telling_the_path(server: Server):
    client = Client(server.url)
    reply = client.get("/<script>")
    assert (reply.status, "There is no such page." in reply.text) == (404, True)
    for path in ("/static/../app.py", "/static/%2e%2e/app.py", "/static/"):
        assert client.get(path).status == 404
    assert client.get("/label").status == 405


@pytest.mark.thorough
def test_the_token_is_asked_for_and_without_it_nobody_gets_in(guarded: Server):
    client = Client(guarded.url)
    assert 'name="token"' in client.get().text
    for wrong in ("", TOKEN[:-1], TOKEN + "x", "\u00e9"):
        reply = client.sign_in("Eve", wrong)
        assert reply.status == 403
        assert "That is not the token." in reply.text
        assert TOKEN not in reply.text
    assert 'id="name"' in client.get().text
    assert 'class="rater">Ann<' in client.sign_in("Ann", TOKEN).text


@pytest.mark.thorough
def test_another_token_signs_everybody_out(tmp_path: Path):
    with serving(tmp_path, make_pairs(1), token=TOKEN) as first:
        client = Client(first.url)
        assert 'class="rater">Ann<' in client.sign_in("Ann", TOKEN).text
        client.close()
    for token, is_in in ((TOKEN, True), (TOKEN.upper(), False)):
        with serving(tmp_path, token=token, port=first.port):
            again = Client(first.url, client.cookies)
            assert ('class="rater">Ann<' in again.get().text) is is_in
            again.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"host": "0.0.0.0"},
            "other machines in, which needs a token: set RLHF_ANNOTATE_TOKEN",
        ),
        ({"host": "192.168.1.5"}, "needs a token"),
        ({"host": "::"}, "needs a token"),
        ({"hosts": "lab.example.org"}, "needs a token"),
        ({"host": "0.0.0.0", "token": TOKEN}, r"set hosts="),
        ({"token": "short"}, "token has 5 characters, which can be guessed"),
        ({"port": 70000}, "port=70000 must be"),
    ],
)
def test_settings_that_would_let_strangers_in_are_refused(settings, message: str):
    with pytest.raises(ValueError, match=message) as caught:
        PageSettings(**settings)
    assert settings.get("token", TOKEN) not in str(caught.value)


def test_the_names_that_are_allowed_follow_from_the_address():
    local = {"localhost", "127.0.0.1", "[::1]"}
    assert PageSettings().allowed_hosts == local
    assert PageSettings(host="::1").allowed_hosts == local
    assert PageSettings(host="127.0.0.2").allowed_hosts == local | {"127.0.0.2"}
    lan = PageSettings(host="192.168.1.5", hosts="Lab.example.org, fe80::1", token=TOKEN)
    assert lan.allowed_hosts == {"192.168.1.5", "lab.example.org", "[fe80::1]"}
    every = PageSettings(host="0.0.0.0", hosts="lab", token=TOKEN)
    assert every.allowed_hosts == local | {"lab"}


@pytest.mark.parametrize(
    ("header", "name"),
    [
        ("Localhost:8000", "localhost"),
        ("[::1]:1", "[::1]"),
        ("a:b", None),
        ("x@localhost", None),
        ("localhost/../", None),
        ("", None),
    ],
)
def test_the_name_is_read_out_of_a_host_header(header: str, name: str | None):
    assert host_name(header) == name
