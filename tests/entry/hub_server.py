"""A hub on this machine: what uploads, and reads of single files, use of Hugging Face's interface.

Large files travel by Git LFS, the hub's older protocol (HF_HUB_DISABLE_XET=1).
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_of_a_test"
COMMIT = "0123456789abcdef0123456789abcdef01234567"  # that every read is of


class Hub(ThreadingHTTPServer):
    """Holds what was uploaded: repositories by name, each with its files."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, dict[str, Any]] = {}
        self.blobs: dict[str, bytes] = {}
        self.refused = 0
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

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("authorization") != f"Bearer {TOKEN}":
            self.server.refused += 1
            self._answer({"error": "Invalid credentials"}, status=401)
            return
        parts = self.path.strip("/").split("/")
        if self.path == "/api/repos/create":
            self._create(json.loads(body))
        elif self.path == "/api/validate-yaml":
            self._answer({"errors": [], "warnings": []})
        elif "preupload" in parts:
            files = json.loads(body)["files"]
            self._answer({"files": [_mode(file["path"]) for file in files]})
        elif self.path.endswith("/info/lfs/objects/batch"):
            self._answer({"transfer": "basic", "objects": self._uploads(json.loads(body))})
        elif self.path == "/verify":
            sent = json.loads(body)
            known = len(self.server.blobs.get(sent["oid"], b"")) == sent["size"]
            self._answer({}, status=200 if known else 404)
        else:
            self._commit("/".join(parts[2:4]), body)

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        oid = self.path.rpartition("/")[2]
        assert hashlib.sha256(body).hexdigest() == oid
        self.server.blobs[oid] = body
        self._answer({})

    def _create(self, wanted: dict[str, Any]) -> None:
        name = f"{wanted.get('organization', 'me')}/{wanted['name']}"
        exists = name in self.server.repositories
        self.server.repositories.setdefault(name, {"wanted": wanted, "files": {}, "commits": []})
        self._answer({"url": f"{self.server.address}/{name}"}, status=409 if exists else 200)

    def _uploads(self, batch: dict[str, Any]) -> list[dict[str, Any]]:
        actions = {
            "verify": {"href": f"{self.server.address}/verify"},
        }
        return [
            {
                "oid": item["oid"],
                "size": item["size"],
                "actions": actions | {"upload": {"href": f"{self.server.address}/{item['oid']}"}},
            }
            for item in batch["objects"]
        ]

    def _commit(self, name: str, body: bytes) -> None:
        repository = self.server.repositories[name]
        for line in body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "header":
                repository["commits"].append(value["summary"])
            elif item["key"] == "file":
                repository["files"][value["path"]] = base64.b64decode(value["content"])
            else:
                repository["files"][value["path"]] = self.server.blobs[value["oid"]]
        url = f"{self.server.address}/{name}/commit/abc"
        self._answer({"commitUrl": url, "commitOid": "abc", "hookOutput": ""})

    def _answer(self, content: dict[str, Any], *, status: int = 200) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


def _mode(path: str) -> dict[str, Any]:
    large = path.endswith(".safetensors")
    return {"path": path, "uploadMode": "lfs" if large else "regular", "shouldIgnore": False}


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
