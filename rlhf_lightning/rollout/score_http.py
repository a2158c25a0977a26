"""A reward that a service computes: texts in, numbers out, as JSON over HTTP."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any

import torch
from torch import nn

from rlhf_lightning.batches import CONVERSATION
from rlhf_lightning.distributed import agreed_max
from rlhf_lightning.rollout.score import Answers, Scores
from rlhf_lightning.rollout.score_rendering import AnswerText, answer_texts
from rlhf_lightning.rollout.score_service import RewardService, ServiceError
from rlhf_lightning.rollout.score_settings import HttpScorerHparams

Rows = Mapping[str, Sequence[Any]]


class HttpScorer:
    """A reward served over HTTP: POST of JSON texts, JSON numbers back.

    By default {"prompts": [...], "completions": [...]} -> {"scores": [...]}. Each rank asks for its
    own rows; if one fails, all fail together.

    Args:
        request: JSON key -> what it holds, one entry an answer: `prompts`, `completions`, `texts`
            (prompt and completion as one), `messages` (the whole conversation as a list of role and
            content), `finished`, or the name of a column of the prompts.
        extra: further keys that are sent as they are, such as a model's name.
        response: where the scores stand in the answer: keys with dots between them. A list on the
            way is walked item by item: `data.score` reads {"data": [{"score": 1.0}, ...]}. Empty
            where the answer is the list itself.
        name: of the component.
        hparams: the fields of `HttpScorerHparams`, `url` among them.
    """

    def __init__(
        self,
        *,
        request: Mapping[str, str] | None = None,
        extra: Mapping[str, Any] | None = None,
        response: str = "scores",
        name: str = "http",
        **hparams: Any,
    ) -> None:
        self.hparams = HttpScorerHparams(**hparams)
        self.service = RewardService(self.hparams)
        default = {"prompts": "prompts", "completions": "completions"}
        self.request = default if request is None else dict(request)
        self.extra = dict(extra or {})
        if not self.request:
            raise ValueError("scorer.request is empty: name at least one of prompts, completions")
        if both := sorted(self.request.keys() & self.extra.keys()):
            raise ValueError(f"scorer.request and scorer.extra both have {both}: keep one of them")
        self.path = tuple(key for key in response.split(".") if key)
        self.name = name

    def build(self, base: Any = None) -> list[nn.Module]:
        """Return no models."""
        return []

    def __call__(self, answers: Answers) -> Scores:
        """Return the service's numbers.

        Raises:
            ServiceError: on every rank, if the service failed on one of them.
            ValueError: if `request` names a column that the prompts do not have.
        """
        rows = self._rows(answers)
        device = answers.sequences.device
        values: list[float] = []
        failure: ServiceError | None = None
        try:
            values = self._ask(rows, len(answers.prompts))
        except ServiceError as error:
            failure = error
        if agreed_max(int(failure is not None), device):
            raise failure or ServiceError(
                f"another rank got no scores from {self.hparams.url}: see its error"
            )
        scores = torch.tensor(values, device=device)
        total = (scores - self.hparams.mean) / self.hparams.std
        return Scores(total, {self.name: total})

    def _rows(self, answers: Answers) -> Rows:
        """Return what is sent, by JSON key."""
        texts = answer_texts(answers)
        known: dict[str, Sequence[Any]] = {
            **{k: v for k, v in answers.prompts.columns.items() if k != CONVERSATION},
            "prompts": [row.prompt for row in texts],
            "completions": [row.completion for row in texts],
            "texts": [row.prompt + row.completion for row in texts],
            "messages": [_messages(row) for row in texts],
            "finished": [row.finished for row in texts],
        }
        for key, content in self.request.items():
            if content not in known:
                raise ValueError(
                    f"scorer.request.{key}={content} is not there: use one of {sorted(known)}"
                )
        return {key: known[content] for key, content in self.request.items()}

    def _ask(self, rows: Rows, num_rows: int) -> list[float]:
        """Return one number a row; the requests of a call share its deadline."""
        deadline = time.monotonic() + self.hparams.deadline
        stop = threading.Event()
        size = self.hparams.batch_size
        batches = [slice(start, start + size) for start in range(0, num_rows, size)]
        pool = ThreadPoolExecutor(min(self.hparams.concurrency, len(batches)))

        def scores_of(batch: slice) -> list[float]:
            body = {key: list(values[batch]) for key, values in rows.items()}
            answer = self.service.post(body | self.extra, deadline=deadline, stop=stop)
            first, last = batch.start, min(batch.stop, num_rows)
            return self._scores(answer, first, last - first)

        try:
            futures = [pool.submit(scores_of, batch) for batch in batches]
            for future in wait(futures, return_when=FIRST_EXCEPTION).done:
                future.result()  # the first failure, not that of the first batch
            return [score for future in futures for score in future.result()]
        finally:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)

    def _scores(self, answer: Any, first: int, count: int) -> list[float]:
        """Return the scores of an answer about `count` rows from row `first` on.

        Raises:
            ServiceError: if they are not there, not that many, or not finite numbers.
        """
        try:
            found = self._find(answer, self.path)
        except RecursionError as error:
            raise ServiceError(
                f"{self.hparams.url} answered with lists within lists, too deep to walk: it must "
                f"return a list with one number an answer{self._where()}"
            ) from error
        if not isinstance(found, list) or len(found) != count:
            got = f"{len(found)} scores" if isinstance(found, list) else type(found).__name__
            raise ServiceError(
                f"{self.hparams.url} returned {got} for {count} answers: it must return a list "
                f"with one number an answer, in their order{self._where()}"
            )
        for row, value in enumerate(found):
            if not _is_finite(value):
                raise ServiceError(
                    f"{self.hparams.url} returned {value!r} as the score of answer {first + row}: "
                    f"it must return finite numbers{self._where()}"
                )
        return [float(value) for value in found]

    def _find(self, node: Any, path: tuple[str, ...]) -> Any:
        if not path:
            return node
        if isinstance(node, list):
            return [self._find(item, path) for item in node]
        if isinstance(node, dict) and path[0] in node:
            return self._find(node[path[0]], path[1:])
        there = f"the keys {sorted(node)}" if isinstance(node, dict) else repr(node)[:100]
        raise ServiceError(
            f"{self.hparams.url} answered without {path[0]!r}, there is {there}: name the place of "
            "the scores with scorer.response=KEY.KEY"
        )

    def _where(self) -> str:
        return f", under {'.'.join(self.path)}" if self.path else ""


def _messages(row: AnswerText) -> list[dict[str, str]]:
    given = [{"role": "user", "content": row.prompt}] if row.messages is None else row.messages
    return [*given, {"role": "assistant", "content": row.completion}]


def _is_finite(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond every float
        return False
