"""A hub on this machine, of which single files are read."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"  # that every read is of


class Hub(ThreadingHTTPServer):
    """Holds repositories by name, each with its files."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, dict[str, Any]] = {}
        self.unreadable: set[str] = set()  # files that no reader may see

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        """Answer `/me/model/resolve/REVISION/FILE`."""
        parts = self.path.strip("/").split("/")
        files = self.server.repositories.get("/".join(parts[:2]), {"files": {}})["files"]
        found = files.get(parts[-1]) if "resolve" in parts else None
        status = 403 if parts[-1] in self.server.unreadable else 404 if found is None else 200
        self.send_response(status)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha256(found or b"").hexdigest()}"')
        if status == 404:
            self.send_header("X-Error-Code", "EntryNotFound")
        self.send_header("Content-Length", str(len(found or b"")))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(found or b"")

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@contextmanager
def running_hub() -> Iterator[Hub]:
    hub = Hub()
    thread = threading.Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        thread.join()
        hub.server_close()
