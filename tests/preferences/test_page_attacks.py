"""What strangers and accidents do to a page that runs, tried on a real server process."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.builders.labels import make_pairs
from tests.preferences.page_server import Client, answer_form, csrf_token_of, serving


def test_a_label_is_refused_once_the_store_was_removed_and_the_end_says_so(tmp_path: Path):
    with serving(tmp_path, make_pairs(5)) as server:
        client = Client(server.url)
        page = client.answer(client.sign_in("Ann").text, "left").text
        server.store.unlink()
        for form in (answer_form(page, "left"), answer_form(page, "tie") | {"at_once": "1"}):
            reply = client.post("/label", form)
            assert (reply.status, "This was not saved" in reply.text) == (503, True)
        assert client.post("/undo", {"csrf_token": csrf_token_of(page)}).status == 503
        assert client.get().status == 503
        said = server.log.read_text()
        assert said.count("\n") == 1
        assert f"{server.store} was moved, removed or replaced" in said
        client.close()
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(30) == 2
        assert f"error: {server.store} was moved" in server.log.read_text().splitlines()[-1]
