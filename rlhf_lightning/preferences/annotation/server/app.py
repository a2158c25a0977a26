"""The page as a Starlette application: sign in, label, undo.

Forms work without a script; `static/page.js` adds the keys, the time on the pair, and that an
answer stays on the screen if the server is away for a moment.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from rlhf_lightning.preferences.annotation.assignment import (
    ANSWERS,
    Answer,
    Sharing,
    Task,
    answer_of,
)
from rlhf_lightning.preferences.annotation.database import StoreError
from rlhf_lightning.preferences.annotation.server.security import Guard, Identity, Visitor
from rlhf_lightning.preferences.annotation.server.settings import PageSettings
from rlhf_lightning.preferences.annotation.store import LabelStore
from rlhf_lightning.preferences.records import turns_of
from rlhf_lightning.text.thoughts import Thoughts, shown

logger = logging.getLogger(__name__)


class Button(NamedTuple):
    """A button: the answer it gives, its key and its text."""

    answer: Answer
    key: str
    text: str


BUTTONS = (
    Button("left", "1", "Answer 1"),
    Button("right", "2", "Answer 2"),
    Button("tie", "t", "Tie"),
    Button("both_bad", "b", "Both bad"),
    Button("skip", "s", "Skip"),
)
NOTES = {
    "gone": "That pair has been rated by others meanwhile; your answer was not needed. Here is "
    "the next one.",
    "repeated": "That answer had arrived already.",
    "differs": "Not kept: as {rater} you had given another answer to that pair, in another window "
    "or on another machine, and the first one stays. Undo takes it back. If another person works "
    "under this name, one of you signs out and takes another.",
    "undone": "Not kept: as {rater} you had taken that answer back, in another window or on "
    "another machine. Answer what is shown.",
    "again": "Signed in as {rater}, who has {labels} so far. If you are another person, sign "
    "out and take another name: one name is one rater, and case and spaces make no other.",
    "nothing": "There is nothing to take back: you have not answered yet, or others have "
    "completed the pair that you skipped.",
}


HERE = Path(__file__).parent
LARGEST_FORM = 64 * 1024
WRONG_TOKEN_SECONDS = 1.0  # what a guess costs, on all connections of an address together


class Page:
    """The handlers of one server.

    Args:
        store: store of the labels.
        settings: settings of the page.
        sharing: rules of sharing pairs.
        port: port that the server listens on.
    """

    def __init__(
        self, store: LabelStore, settings: PageSettings, sharing: Sharing, port: int
    ) -> None:
        self._store = store
        self._settings = settings
        self._sharing = sharing
        self._slowed: set[str] = set()  # addresses of which no token is looked at now
        self._identity = Identity(store.secret, settings.token, str(port))
        self._templates = Environment(
            loader=FileSystemLoader(HERE / "templates"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            auto_reload=False,  # or each page asks the disk whether a template has changed
        )

    def app(self) -> ASGIApp:
        """Return the application, guarded."""
        inner = Starlette(
            routes=[
                Route("/", self.home),
                Route("/start", self.start, methods=["POST"]),
                Route("/label", self.label, methods=["POST"]),
                Route("/undo", self.undo, methods=["POST"]),
                Route("/leave", self.leave, methods=["POST"]),
                Mount("/static", StaticFiles(directory=HERE / "static")),
            ],
            exception_handlers={HTTPException: self.refused, StoreError: self.not_saved},
        )
        return Guard(inner, self._settings.allowed_hosts)

    async def home(self, request: Request) -> Response:
        """Show the rater's pair, the end, or the way in."""
        visitor = self._identity.visitor(request)
        if visitor.rater_id is None:
            return self._start_page(request, visitor)
        note = request.query_params.get("note", "")
        return await run_in_threadpool(self._next_page, visitor, visitor.rater_id, note)

    async def start(self, request: Request) -> Response:
        """Sign in under a name."""
        form = await read_form(request)
        visitor = self._own_form(request, form)
        peer = request.state.peer
        if peer in self._slowed:
            problem = "A wrong token came from your address a moment ago. Try again."
            return self._start_page(request, visitor, problem, form, 429)
        if not self._identity.is_token(form.get("token", "")):
            self._slowed.add(peer)
            await asyncio.sleep(WRONG_TOKEN_SECONDS)
            self._slowed.discard(peer)
            return self._start_page(request, visitor, "That is not the token.", form, 403)
        try:
            rater_id, is_new = await run_in_threadpool(self._store.enter, form.get("name", ""))
        except StoreError as error:
            return self._start_page(request, visitor, f"{error}.", form, 422)
        response = RedirectResponse("/" if is_new else "/?note=again", status_code=303)
        self._identity.sign_in(response, visitor, rater_id, secure=is_secure(request))
        return response

    async def label(self, request: Request) -> Response:
        """Save an answer."""
        form = await read_form(request)
        visitor, rater_id = self._rater(request, form)
        answer, number = form.get("answer", ""), form.get("assignment", "")
        if answer not in ANSWERS or not (number.isascii() and number.isdecimal()):
            raise HTTPException(400, "That form holds no answer. Load the page again.")

        seconds = None
        with suppress(ValueError):  # sent by the script alone
            seconds = float(form.get("seconds", ""))

        def keep() -> Response:
            outcome = self._store.label(
                rater_id,
                min(int(number[:19]), 2**63 - 1),
                answer,
                self._sharing,
                seconds=seconds,
                reason=form.get("reason"),
            )
            return self._redirect(visitor, form, "" if outcome == "kept" else outcome)

        return await run_in_threadpool(keep)

    async def undo(self, request: Request) -> Response:
        """Take the last label back."""
        form = await read_form(request)
        visitor, rater_id = self._rater(request, form)

        def take_back() -> Response:
            undone = self._store.undo(rater_id, self._sharing)
            return self._redirect(visitor, form, "" if undone else "nothing")

        return await run_in_threadpool(take_back)

    async def leave(self, request: Request) -> Response:
        """Sign out."""
        form = await read_form(request)
        self._own_form(request, form)
        response = RedirectResponse("/", status_code=303)
        self._identity.sign_out(response)
        return response

    async def refused(self, request: Request, error: Exception) -> Response:
        """Say why a request was refused."""
        assert isinstance(error, HTTPException)
        text = error.detail if error.status_code != 404 else "There is no such page."
        return self._render("message.html", {"message": text}, error.status_code)

    async def not_saved(self, request: Request, error: Exception) -> Response:
        """Say that the store failed; nothing was acknowledged."""
        logger.warning("the page refuses requests: %s", error)
        what = "The store cannot be read" if request.method == "GET" else "This was not saved"
        text = f"{what}. Tell the person who runs the page: {error}"
        return self._render("message.html", {"message": text}, 503)

    def _redirect(self, visitor: Visitor, form: Mapping[str, str], note: str) -> Response:
        """Respond to a form: the script takes the next page at once, a browser is redirected."""
        if "at_once" in form and visitor.rater_id is not None:
            return self._next_page(visitor, visitor.rater_id, note)
        return RedirectResponse(f"/?note={note}" if note else "/", status_code=303)

    def _next_page(self, visitor: Visitor, rater_id: int, note: str) -> Response:
        task = self._store.next_task(rater_id, self._sharing)
        rater, progress = self._store.rater_name(rater_id), self._store.progress(rater_id)
        labels = f"{progress.labelled} label{'' if progress.labelled == 1 else 's'}"
        values = {
            "rater": rater,
            "progress": progress,
            "csrf_token": self._identity.csrf_token(visitor),
            "note": NOTES[note].format(rater=rater, labels=labels) if note in NOTES else None,
        }
        if task is None:
            return self._render("done.html", values)
        return self._render("pair.html", values | task_values(task, self._settings.thoughts))

    def _start_page(
        self,
        request: Request,
        visitor: Visitor,
        problem: str = "",
        form: Mapping[str, str] | None = None,
        status: int = 200,
    ) -> Response:
        values = {
            "csrf_token": self._identity.csrf_token(visitor),
            "needs_token": self._identity.needs_token,
            "problem": problem,
            "name": (form or {}).get("name", ""),
        }
        response = self._render("start.html", values, status)
        self._identity.keep_visit(response, visitor, secure=is_secure(request))
        return response

    def _own_form(self, request: Request, form: Mapping[str, str]) -> Visitor:
        visitor = self._identity.visitor(request)
        if not self._identity.is_csrf_token(visitor, form.get("csrf_token", "")):
            raise HTTPException(
                403, "This form is out of date, or cookies are off. Load the page again."
            )
        return visitor

    def _rater(self, request: Request, form: Mapping[str, str]) -> tuple[Visitor, int]:
        visitor = self._own_form(request, form)
        if visitor.rater_id is None:
            raise HTTPException(403, "You are not signed in any more. Load the page again.")
        return visitor, visitor.rater_id

    def _render(self, name: str, values: Mapping[str, Any], status: int = 200) -> HTMLResponse:
        template = self._templates.get_template(name)
        settings = {"title": self._settings.title, "instructions": self._settings.instructions}
        return HTMLResponse(template.render(settings | dict(values)), status_code=status)


def task_values(task: Task, thoughts: Thoughts = "drop") -> dict[str, Any]:
    """Return the values that `pair.html` shows: never a response's source, nor that it is gold."""
    pair = task.pair
    answers = [
        shown("", text, thoughts, "page.thoughts").response for text in (pair.first, pair.second)
    ]
    return {
        "assignment": task.assignment_id,
        "domain": pair.domain,
        "turns": [{"role": role, "content": text} for role, text in turns_of(pair)],
        "answers": answers if task.shown_first == "first" else answers[::-1],
        "buttons": BUTTONS,
        "before": answer_of(task.before.choice, task.shown_first) if task.before else None,
        "reason": (task.before.reason or "") if task.before else "",
    }


async def read_form(request: Request) -> dict[str, str]:
    """Return the fields of a form.

    Raises:
        HTTPException: if it is too large or no form.
    """
    body = bytearray()
    try:
        async for piece in request.stream():
            body += piece
            if len(body) > LARGEST_FORM:
                raise HTTPException(413, "That is too long.")
    except ClientDisconnect as error:
        raise HTTPException(400, "That form did not arrive whole.") from error
    try:
        pairs = parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=20, errors="strict")
    except ValueError as error:
        raise HTTPException(400, "That is no form of this page.") from error
    return dict(pairs)


def is_secure(request: Request) -> bool:
    """Return whether cookies may ask for an encrypted connection."""
    return request.url.scheme == "https"
