"""The page where people label: one pair at a time, in a browser. Needs the extra `annotate`.

It listens on 127.0.0.1, and lets in who has the token of the store. Forms work without a script;
`static/page.js` adds the keys, and keeps a choice on the screen while the server is away.
"""

from __future__ import annotations

import re
import secrets
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, unquote

import uvicorn
from jinja2 import FileSystemLoader
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from rlhf_lightning.preferences.annotation import store as labels
from rlhf_lightning.preferences.annotation.store import LabelStore, StoreError, Task
from rlhf_lightning.preferences.records import SIDES, turns_of
from rlhf_lightning.runs.jinja import environment
from rlhf_lightning.text.thoughts import Thoughts, shown

HERE = Path(__file__).parent
HOST = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d+)?", re.IGNORECASE)
# Nothing foreign may be loaded, nothing may be framed, forms lead nowhere else.
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
}
BUTTONS = (
    ("left", "1", "Answer 1"),
    ("right", "2", "Answer 2"),
    ("tie", "t", "Tie"),
    ("both_bad", "b", "Both bad"),
    ("skip", "s", "Skip"),
)
BEFORE = "You had labelled that pair already, and that label stays. Undo takes it back."
LONGEST_REASON = 2000


class Page:
    """The handlers of one server.

    Args:
        store: store of the labels.
        port: port of the server, which tells its cookies from those of another one.
        title: the question above the pairs.
        instructions: what raters are to look at.
        thoughts: whether raters read the thoughts of responses that think.
    """

    def __init__(
        self, store: LabelStore, port: int, *, title: str, instructions: str, thoughts: Thoughts
    ) -> None:
        self._store, self._thoughts, self._token = store, thoughts, store.token
        self._token_cookie, self._name_cookie = f"token_{port}", f"name_{port}"
        pages = environment(FileSystemLoader(HERE / "templates"), autoescape=True)
        pages.globals |= {"title": title, "instructions": instructions, "buttons": BUTTONS}
        self._template = pages.get_template("page.html")

    def app(self) -> Starlette:
        """Return the application."""
        forms = (self.start, self.label, self.undo, self.leave)
        posts = [Route(f"/{form.__name__}", form, methods=["POST"]) for form in forms]
        static = Mount("/static", StaticFiles(directory=HERE / "static"))
        return Starlette(
            routes=[Route("/", self.home), *posts, static],
            middleware=[Middleware(BaseHTTPMiddleware, dispatch=self.guard)],
            exception_handlers={StoreError: self.not_saved},
        )

    async def guard(self, request: Request, respond: RequestResponseEndpoint) -> Response:
        """Refuse other hosts, forms of other sites, and whoever has no token."""
        response = self._refusal(request) or await respond(request)
        response.headers.update(HEADERS)
        return response

    def _refusal(self, request: Request) -> Response | None:
        headers = request.headers
        host, origin = headers.get("host", ""), headers.get("origin")
        if len(headers.getlist("host")) != 1 or not HOST.fullmatch(host):
            return PlainTextResponse("This page is on 127.0.0.1 and localhost alone.\n", 421)
        is_own = origin in (f"http://{host}", f"https://{host}")
        if origin is None:
            is_own = headers.get("sec-fetch-site", "same-origin") == "same-origin"
        if request.method not in ("GET", "HEAD") and not is_own:
            return PlainTextResponse("A form of another site was refused.\n", 403)
        if _same(request.query_params.get("token", ""), self._token):
            response = RedirectResponse("/", 303)
            self._keep(response, self._token_cookie, self._token)
            return response
        if _same(request.cookies.get(self._token_cookie, ""), self._token):
            return None
        return PlainTextResponse("Open the address with ?token= that was printed.\n", 403)

    async def home(self, request: Request) -> Response:
        """Show the rater's pair, the end, or the way in."""
        rater = self._rater(request)
        if not rater:
            return self._render("start", problem="", name="")
        task, progress = self._store.next_task(rater), self._store.progress(rater)
        note = BEFORE if "before" in request.query_params else ""
        values: dict[str, Any] = {"rater": rater, "progress": progress, "note": note}
        if task is None:
            return self._render("done", agreement=labels.describe_agreement(self._store), **values)
        return self._render("pair", **values, **task_values(task, self._thoughts))

    async def start(self, request: Request) -> Response:
        """Sign in under a name."""
        name = (await read_form(request)).get("name", "")
        try:
            rater = self._store.enter(name)
        except StoreError as error:
            return self._render("start", 422, problem=f"{error}.", name=name)
        response = RedirectResponse("/", 303)
        self._keep(response, self._name_cookie, quote(rater))
        return response

    async def label(self, request: Request) -> Response:
        """Keep an answer."""
        form, rater = await read_form(request), self._rater(request)
        answer, pair_id = form.get("answer"), form.get("pair", "")
        if not rater or answer not in [name for name, _, _ in BUTTONS]:
            return self._render("message", 400, message="That was not saved. Load the page again.")
        if answer in ("left", "right"):
            is_first = (answer == "left") == (labels.side_shown_first(rater, pair_id) == "first")
            answer = "first" if is_first else "second"
        reason = form.get("reason", "")[:LONGEST_REASON]
        is_new = self._store.label(rater, pair_id, answer, reason=reason)  # type: ignore[arg-type]
        return RedirectResponse("/" if is_new else "/?before", 303)

    async def undo(self, request: Request) -> Response:
        """Take the last label back."""
        self._store.undo(self._rater(request))
        return RedirectResponse("/", 303)

    async def leave(self, request: Request) -> Response:
        """Sign out."""
        response = RedirectResponse("/", 303)
        response.delete_cookie(self._name_cookie)
        return response

    async def not_saved(self, request: Request, error: Exception) -> Response:
        """Say that the store failed; nothing was confirmed."""
        text = f"This was not saved. Tell the person who runs the page: {error}"
        return self._render("message", 503, message=text)

    def _rater(self, request: Request) -> str:
        return unquote(request.cookies.get(self._name_cookie, ""))

    def _keep(self, response: Response, key: str, value: str) -> None:
        response.set_cookie(key, value, max_age=30 * 24 * 3600, httponly=True, samesite="lax")

    def _render(self, screen: str, status: int = 200, **values: Any) -> Response:
        return HTMLResponse(self._template.render(screen=screen, **values), status)


def task_values(task: Task, thoughts: Thoughts = "drop") -> dict[str, Any]:
    """Return what the page shows of a pair: never a response's source, nor the known answer."""
    pair = task.pair
    texts = [pair.first, pair.second][:: 1 if task.shown_first == "first" else -1]
    before: str | None = task.choice
    if task.choice in SIDES:
        before = "left" if task.choice == task.shown_first else "right"
    return {
        "pair": pair.pair_id,
        "domain": pair.domain,
        "turns": turns_of(pair),
        "answers": [shown("", text, thoughts, "page.thoughts").response for text in texts],
        "before": before,
        "reason": task.reason or "",
    }


async def read_form(request: Request) -> dict[str, str]:
    """Return the fields of a form."""
    return dict(parse_qsl((await request.body()).decode(errors="replace"), keep_blank_values=True))


def _same(given: str, expected: str) -> bool:
    return secrets.compare_digest(given.encode("utf-8", "replace"), expected.encode())


def serve(store: LabelStore, *, port: int, announce: Callable[[str], None], **page: Any) -> None:
    """Serve the page until the process is interrupted.

    Args:
        store: store of the labels.
        port: port of 127.0.0.1; 0 takes a free one.
        announce: called with the address as soon as requests are accepted.
        page: `title`, `instructions` and `thoughts` of `Page`.

    Raises:
        OSError: if the port is taken.
    """
    # asyncio sends small packets at once (TCP_NODELAY) only where the protocol is named; without it
    # every page waits 40 ms for an acknowledgement.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", port))
        listening.listen()
        port = listening.getsockname()[1]
        app = Page(store, port, **page).app()
        how: dict[str, Any] = {"access_log": False, "server_header": False, "lifespan": "off"}
        how |= {"log_level": "warning", "ws": "none", "timeout_graceful_shutdown": 5}
        announce(f"http://127.0.0.1:{port}/?token={store.token}")
        uvicorn.Server(uvicorn.Config(app, **how)).run(sockets=[listening])
