"""The labelling page as its users start it: a process of its own, on a port of this machine."""

from __future__ import annotations

import http.client
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlencode, urlsplit

from rlhf_lightning.preferences.annotation.store import LabelStore
from rlhf_lightning.preferences.records import Label, Pair, write_records

PAIR = re.compile(r'name="pair" value="(\w+)"')


@dataclass
class Server:
    """A running page: its address with the token, its file and its process."""

    url: str
    store: Path
    process: subprocess.Popen[str]

    @property
    def port(self) -> int:
        port = urlsplit(self.url).port
        assert port is not None
        return port

    def labels(self) -> list[Label]:
        with LabelStore(self.store) as store:
            return list(store.labels())

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)


@contextmanager
def serving(
    folder: Path, pairs: Sequence[Pair] = (), *settings: str, port: int = 0
) -> Iterator[Server]:
    """Run the page on the store in `folder`, with these pairs added."""
    store = folder / "labels.sqlite"
    command = [sys.executable, "-m", "rlhf_lightning.annotate", f"store={store}"]
    if pairs:
        file = folder / "pairs.jsonl"
        write_records(file, pairs)
        command.append(f"file={file}")
    command += [f"page.port={port}", *settings]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        said = []
        for line in process.stdout:
            said.append(line)
            if line.startswith("http://"):
                break
        else:
            raise AssertionError(f"ended with {process.wait(10)}: {said}")
        yield Server(line.strip(), store, process)
    finally:
        process.kill()
        process.wait(10)
        process.stdout.close()


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
