"""The labelling page as its users start it: a process of its own, on a port of this machine."""

from __future__ import annotations

import http.client
import os
import re
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import mkdtemp
from urllib.parse import urlencode, urlsplit

from rlhf_lightning.preferences.annotation.store import LabelStore
from rlhf_lightning.preferences.records import Label, Pair, write_records
from tests.builders.processes import ForkedPython

PAIR = re.compile(r'name="pair" value="(\w+)"')


@dataclass
class Server:
    """A running page: its address with the token, its file and its process."""

    url: str
    store: Path
    process: ForkedPython
    output: Path

    @property
    def port(self) -> int:
        port = urlsplit(self.url).port
        assert port is not None
        return port

    def labels(self) -> list[Label]:
        with LabelStore(self.store) as store:
            return list(store.labels())

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait(10)

    def stop(self) -> str:
        """Stop it as Control-C does; return what it said."""
        os.kill(self.process.pid, signal.SIGINT)
        assert self.process.wait(30) == 0
        return self.output.read_text()


@contextmanager
def serving(
    folder: Path, pairs: Sequence[Pair] = (), *settings: str, port: int = 0
) -> Iterator[Server]:
    """Run the page on the store in `folder`, with these pairs added."""
    store = folder / "labels.sqlite"
    command = ["-m", "rlhf_lightning.annotate", f"store={store}"]
    if pairs:
        file = folder / "pairs.jsonl"
        write_records(file, pairs)
        command.append(f"file={file}")
    command += [f"page.port={port}", *settings]
    output = Path(mkdtemp(dir=folder)) / "output"
    process = ForkedPython(command, Path.cwd(), os.environ, output)
    try:
        address = None
        while address is None:
            said = output.read_text() if output.exists() else ""
            assert process.poll() is None, said
            address = re.search(r"^(http://.+)\n", said, re.M)
            time.sleep(0.01)
        yield Server(address[1], store, process, output)
    finally:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
            process.wait(10)


@dataclass
class Reply:
    """What a server answered."""

    status: int
    text: str
    headers: http.client.HTTPMessage


@dataclass
class Client:
    """A rater without a browser: keeps cookies, sends forms, follows redirects only if told to."""

    url: str
    cookies: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        assert parts.hostname is not None
        self._connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=30)

    def get(self, path: str = "/", **headers: str) -> Reply:
        return self._send("GET", path, None, headers)

    def post(self, path: str, form: dict[str, str], **headers: str) -> Reply:
        return self._send("POST", path, urlencode(form), headers)

    def sign_in(self, name: str) -> Reply:
        parts = urlsplit(self.url)
        assert self.get(f"/?{parts.query}").status == 303
        reply = self.post("/start", {"name": name})
        return self.get() if reply.status == 303 else reply

    def answer(self, page: str, what: str) -> Reply:
        """Answer the pair on this page, and return the next page."""
        reply = self.post("/label", answer_form(page, what))
        assert (reply.status, reply.headers["Location"]) == (303, "/")
        return self.get()

    def close(self) -> None:
        self._connection.close()

    def _send(self, method: str, path: str, body: str | None, headers: dict[str, str]) -> Reply:
        sent = {key.replace("_", "-"): value for key, value in headers.items()}
        if self.cookies:
            sent.setdefault("Cookie", "; ".join(f"{k}={v}" for k, v in self.cookies.items()))
        self._connection.request(method, path, body, sent)
        response = self._connection.getresponse()
        reply = Reply(response.status, response.read().decode(), response.headers)
        for cookie in response.headers.get_all("Set-Cookie") or ():
            key, _, value = cookie.partition(";")[0].partition("=")
            self.cookies[key] = value
        return reply


def answer_form(page: str, what: str) -> dict[str, str]:
    found = PAIR.search(page)
    assert found is not None, page
    return {"pair": found.group(1), "answer": what}
