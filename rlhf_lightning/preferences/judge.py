"""A judge: a model that reads both responses, in both orders, and says which is better.

`Judgement` is its reply to one order; a label is made of both.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
import shutil
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any, Literal

from rlhf_lightning.arguments import AtLeast0, JsonObject, PathStr, Seed, Size, checked
from rlhf_lightning.functional.logprobs import LARGEST
from rlhf_lightning.preferences.agreement import Share
from rlhf_lightning.preferences.annotators import AnnotationError, labelled
from rlhf_lightning.preferences.judge_service import GO_ON, JudgeHparams, JudgeService, Reply
from rlhf_lightning.preferences.records import SIDES, Journal, Kind, Label, Pair, Side, shown_prompt
from rlhf_lightning.text.thoughts import Thoughts, shown
from rlhf_lightning.text.verdict import LETTERS, SCHEMA, parse_verdict

logger = logging.getLogger(__name__)

NUM_SHOWN = 200  # characters of a reply in a message
# Why a reply has no verdict, and what to change.
_FIXES = {
    "refused": "null judge.max_tokens, judge.max_completion_tokens, judge.temperature or "
    "judge.system",
    "cut off": "raise judge.max_tokens={0.max_tokens} (thoughts count too), or switch thinking off",
    "no verdict": "end judge.template with {1!r}, or set judge.read=json or judge.model",
}
_ASKED_OTHERWISE = (
    "%d replies of %s are asked for again: they had another judge.template, judge.system, "
    "judge.thoughts or judge.read"
)
SYSTEM = "You compare two answers to a request, fairly and in a few words."
TEMPLATE = Path(__file__).with_name("judge_template.txt").read_text("utf-8")
Reading = Literal["text", "json", "logprobs"]
# How a judge is asked to reply, and behind a template of your own too.
CLOSINGS: dict[Reading, str] = {
    "text": "Reply with [[A]], [[B]], or [[C]] if neither is better.",
    "json": 'Reply with JSON, {"verdict": "A"}, "B", or "C" if neither is better.',
    "logprobs": "Reply with one letter: A, B, or C if neither is better.",
}
_PLACE = re.compile(r"\{(prompt|a|b|mark)\}")
# Spellings of control tokens, whatever the judge's tokenizer: <|im_end|>, </s>, <start_of_turn>,
# <turn|>, [INST], <<SYS>>, <think>, and the full-width bars of DeepSeek.
_CONTROL = (
    r"<[|\uff5c][^<>\s]{1,40}>|<[^<>\s]{1,40}[|\uff5c]>|</?(?:s|bos|eos|pad|unk|think)>"
    r"|</?\w+_of_\w+>|<</?SYS>>|\[/?(?:INST|THINK|[A-Z]+_[A-Z]+)\]"
)
_VERDICT = re.compile(r"\[\[\s*[ABC]\b")


class JudgePrompt:
    """Fills a template with a pair.

    `{mark}` is a delimiter that is drawn for each request, from the seed. Fixed delimiters of the
    template (the lines next to its places) and control tokens that a text spells get a space behind
    their first character: a judge can read them but not mistake them.

    Args:
        template: with the places `{prompt}`, `{a}` and `{b}`, and `{mark}` if wanted.
        system: the system message; empty or None for none.
        seed: seeds the delimiters.
        thoughts: whether responses that think are shown with their thoughts.

    Raises:
        ValueError: for a template without one of its places.
    """

    def __init__(
        self, template: str, system: str | None, seed: int, thoughts: Thoughts = "drop"
    ) -> None:
        missing = [place for place in ("{prompt}", "{a}", "{b}") if place not in template]
        if missing:
            raise ValueError(f"judge.template lacks {', '.join(missing)}")
        self.template, self.seed, self.thoughts = template, seed, thoughts
        self.system = [{"role": "system", "content": system}] if system else []
        between = re.split(r"\{(?:prompt|a|b)\}", template.replace("{mark}", ""))
        parts = [part.strip().splitlines() or [""] for part in between]
        lines = {part[-1].strip() for part in parts[:-1]} | {part[0].strip() for part in parts[1:]}
        fixed = "".join(
            "|(?i:" + r"\b" * line[0].isalnum() + r"\s+".join(map(re.escape, line.split())) + ")"
            for line in sorted(lines - {""}, key=len, reverse=True)
        )
        self._spelled = re.compile(_CONTROL + fixed)

    def question(self, pair: Pair, order: Side) -> tuple[list[dict[str, str]], dict[str, Any]]:
        """Return the messages to a judge that is shown the response `order` as A.

        Behind them stand `mark` and `spelled` of the `Judgement`.
        """
        texts = (pair.first, pair.second) if order == "first" else (pair.second, pair.first)
        answers = [shown("", text, self.thoughts, "judge.thoughts").response for text in texts]
        spelled = sum(bool(self._spelled.search(x) or _VERDICT.search(x)) for x in answers)
        asked = shown_prompt(pair)
        filled = [
            self._spelled.sub(lambda found: f"{found.group()[0]} {found.group()[1:]}", text)
            for text in (asked, *answers)
        ]
        draws = (f"{self.seed}/{pair.pair_id}/{order}/{n}".encode() for n in count())
        marks = ("=====" + hashlib.sha256(draw).hexdigest()[:8] for draw in draws)
        mark = next(each for each in marks if not any(each in text for text in filled))
        values = dict(zip(("prompt", "a", "b"), filled, strict=True)) | {"mark": mark}
        # In one pass: a response that spells "{b}" is not filled in.
        text = _PLACE.sub(lambda found: values[found.group(1)], self.template)
        messages = [*self.system, {"role": "user", "content": text}]
        return messages, {"mark": mark, "spelled": spelled}


@dataclass(frozen=True)
class Judgement:
    """A judge's reply to a pair in one order.

    Args:
        pair_id: id of the pair.
        judge: name of the judge.
        order: the response of the pair that was shown as A.
        verdict: the better response of the pair, `tie`, or None where the reply cannot be read.
        reply: text of the reply; None if the request was refused.
        input_tokens, output_tokens: as the service counts them, else estimated.
        cost: cost of the request.
        retries: number of failed attempts.
        probabilities: probabilities of A, B and C, where they were read instead of the text.
        unread: reason why there is no verdict: `refused`, `cut off` or `no verdict`.
        said: the service's sentence where it refused.
        mark: the delimiter of this request.
        spelled: how many of the two responses spell a delimiter, a control token or a verdict.
        estimated: the service did not count the tokens.
        asked: digest of how it was asked: template, system message, thoughts and what is read.
    """

    pair_id: str
    judge: str
    order: Side
    verdict: Literal["first", "second", "tie"] | None = None
    reply: str | None = None
    input_tokens: int = 0
    output_tokens: int = 0
    cost: float = 0.0
    retries: int = 0
    probabilities: Mapping[str, float] | None = None
    unread: str | None = None
    said: str = ""
    mark: str = ""
    spelled: int = 0
    estimated: bool = False
    asked: str = ""


def letter_probabilities(top_tokens: Mapping[str, float]) -> dict[str, float] | None:
    """Return the probabilities of A, B and C among themselves.

    None if a judge says something else, a thought for example: they have less than half of the
    probability. So it is where one has a log-probability that is none.
    """
    found = dict.fromkeys(LETTERS, 0.0)
    for token, logprob in top_tokens.items():
        if (letter := token.strip(" \n\u0120\u2581")) in found:
            if not isinstance(logprob, int | float) or not logprob <= LARGEST:
                return None
            found[letter] += math.exp(logprob)
    total = sum(found.values())
    return {letter: value / total for letter, value in found.items()} if total >= 0.5 else None


def judge_figures(judgements: Sequence[Judgement]) -> dict[str, Any]:
    """Return the figures of one judge.

    Returns:
        Numbers of `requests`, of `retries`, of requests that the service `refused`, and of replies
        that were `unreadable` or `ties`; `shown_first_wins`, the share for the response shown
        first, among replies that take a side; `consistent`, the share of pairs whose two orders
        agree, among those with two readable replies; `input_tokens`, `output_tokens` and their
        `cost`; `estimated`, requests whose tokens the service did not count; `spelled`, responses
        that spell a delimiter of the prompt, a control token or a verdict.
    """
    decided = [j for j in judgements if j.verdict in SIDES]
    by_pair: dict[str, list[Judgement]] = {}
    for judgement in judgements:
        if judgement.verdict is not None:
            by_pair.setdefault(judgement.pair_id, []).append(judgement)
    both = [found for found in by_pair.values() if len(found) == 2]
    summed = ("input_tokens", "output_tokens", "cost", "estimated")
    return {
        "requests": len(judgements),
        "retries": sum(j.retries for j in judgements),
        "refused": sum(j.reply is None for j in judgements),
        "unreadable": sum(j.verdict is None and j.reply is not None for j in judgements),
        "ties": sum(j.verdict == "tie" for j in judgements),
        "shown_first_wins": asdict(Share.among(j.verdict == j.order for j in decided)),
        "consistent": asdict(Share.among(a.verdict == b.verdict for a, b in both)),
        **{name: sum(getattr(j, name) for j in judgements) for name in summed},
        "spelled": sum({j.pair_id: j.spelled for j in judgements}.values()),
    }


class JudgeAnnotator:
    """Asks a model about each pair twice, the second time with the responses swapped.

    Reading verdicts, a side wins if both orders name it; where they differ, or one is a tie, the
    label is a tie; where one cannot be read, a skip. Reading log-probabilities, each response has
    the mean of its probabilities in the two orders, which removes the position bias.

    Each reply is in the journal with its cost. If most replies after a batch cannot be read, that
    ends the labelling.

    Args:
        hparams: the fields of `JudgeHparams`, `model` among them.
        name: name of the annotator; the model's by default.
        read: `text` reads the last [[A]], [[B]] or [[C]]; `json` asks a service with structured
            output for {"verdict": "A"}; `logprobs` reads those of the letters A, B and C.
        system: the system message; empty or None for none.
        template: with the places `{prompt}`, `{a}` and `{b}`; `{mark}` is a delimiter that is drawn
            for each request. None is our own; yours says how to reply, as `CLOSINGS` do.
        thoughts: whether the judge reads the thoughts of responses that think.
        extra: further keys of the request, such as `{reasoning_effort: low}`.
        tie_below: with log-probabilities, a smaller difference of the two responses is a tie.
        batch_size: pairs whose labels reach the disk together; replies do one by one.
        seed: seeds the delimiters.
        known: `judgements.jsonl` of an earlier run, whose replies are not asked for again.

    Raises:
        ValueError: for a template without one of its places, or values that cannot be.
    """

    kind: Kind = "judge"
    Hparams = JudgeHparams

    @checked
    def __init__(
        self,
        *,
        name: str | None = None,
        read: Reading = "text",
        system: str | None = SYSTEM,
        template: str | None = None,
        thoughts: Thoughts = "drop",
        extra: JsonObject | None = None,
        tie_below: AtLeast0 = 0.0,
        batch_size: Size = 32,
        seed: Seed = 1,
        known: PathStr | None = None,
        **hparams: Any,
    ) -> None:
        self.hparams = JudgeHparams(**hparams)
        template = TEMPLATE + CLOSINGS[read] if template is None else template
        self.prompt = JudgePrompt(template, system, seed, thoughts)
        self.name, self.read, self.known = name or self.hparams.model, read, known
        self.extra = ({"response_format": SCHEMA} if read == "json" else {}) | dict(extra or {})
        how = json.dumps([template, system or "", thoughts, read])
        self.asked = hashlib.sha256(how.encode("utf-8", "surrogatepass")).hexdigest()[:16]
        self.tie_below, self.batch_size = tie_below, batch_size
        self._journal: Journal[Judgement] | None = None
        self.judgements: list[Judgement] = []  # all, those of earlier runs included
        self._known: dict[tuple[str, Side], Judgement] = {}
        self._spent = 0.0
        self._service: JudgeService | None = None

    def keep_in(self, path: Path | str) -> None:
        """Write judgements to this journal, and do not ask again for those that are there.

        Those of another template, system message or way to read are left out. Where most of them
        could not be read, that ended the run before: those are asked for again.

        Raises:
            AnnotationError: if `known` cannot be read.
        """
        try:
            if self.known is not None and not Path(path).exists():
                shutil.copyfile(self.known, path)
            self._journal = Journal(path, Judgement)
            made = self._journal.read()
        except (OSError, ValueError, TypeError) as error:
            raise AnnotationError(f"judge.known={self.known}, {path}: {error}") from error
        mine = [judgement for judgement in made if judgement.judge == self.name]
        alike = [judgement for judgement in mine if judgement.asked in ("", self.asked)]
        if len(alike) < len(mine):
            logger.warning(_ASKED_OTHERWISE, len(mine) - len(alike), path)
        for judgement in alike:
            self._remember(judgement)
        if self._mostly_unread:
            self._known = {key: j for key, j in self._known.items() if j.verdict is not None}

    def label(self, pairs: Sequence[Pair]) -> list[Label]:
        """Return one label a pair.

        Raises:
            AnnotationError: if the service fails, most replies cannot be read, or `max_cost` is
                reached.
        """
        todo = [(p, side) for p in pairs for side in SIDES if (p.pair_id, side) not in self._known]
        if todo:
            self._ask_all(todo)
        return [self._label(pair) for pair in pairs]

    def _ask_all(self, todo: Sequence[tuple[Pair, Side]]) -> None:
        service = self._service = self._service or JudgeService(self.hparams)
        limit, failures, lock = self.hparams.max_cost, list[Exception](), threading.Lock()

        def ask(item: tuple[Pair, Side]) -> None:
            if failures or (limit is not None and self._spent >= limit):
                return
            messages, about = self.prompt.question(*item)
            logprobs = self.read == "logprobs"
            try:
                reply = service.ask(messages, logprobs=logprobs, extra=self.extra)
            except Exception as error:  # requests under way are paid for: they end first
                failures.append(error)
                return
            judgement = self._judgement(*item, reply, **about)
            with lock:
                self._remember(judgement)
                if self._journal is not None:
                    self._journal.append([judgement])

        with ThreadPoolExecutor(self.hparams.concurrency) as pool:
            list(pool.map(ask, todo))
        if failures:
            raise failures[0]
        if any((pair.pair_id, order) not in self._known for pair, order in todo):
            raise AnnotationError(f"judge.max_cost={limit:g} is reached: raise it, {GO_ON}")
        if self._mostly_unread:
            raise AnnotationError(self._unread_message())

    @property
    def _mostly_unread(self) -> bool:
        return sum(j.verdict is None for j in self._known.values()) * 2 > len(self._known)

    def _remember(self, judgement: Judgement) -> None:
        self.judgements.append(judgement)
        self._known[judgement.pair_id, judgement.order] = judgement
        self._spent += judgement.cost

    def _unread_message(self) -> str:
        unread = [j for j in self._known.values() if j.verdict is None]
        ((why, _),) = Counter(j.unread for j in unread).most_common(1)
        last = next(j for j in reversed(unread) if j.unread == why)
        shown = " ".join((last.reply or last.said).split())[:NUM_SHOWN]
        fix = _FIXES.get(str(why), _FIXES["no verdict"]).format(self.hparams, CLOSINGS[self.read])
        count = f"{len(unread)} of {len(self._known)} replies have no verdict"
        return f"{self.name}: {count} ({why}), the last is {shown!r}: {fix}"

    def _judgement(self, pair: Pair, order: Side, reply: Reply, **about: Any) -> Judgement:
        letter, probabilities, why = None, None, "refused"
        if self.read == "logprobs":
            probabilities = letter_probabilities(reply.top_tokens)
            letter = max(probabilities, key=lambda k: probabilities[k]) if probabilities else None
        elif not reply.refused:
            letter = parse_verdict(reply.text, cut_off=reply.cut_off)
        if not reply.refused:
            why = "cut off" if reply.cut_off and self.read != "logprobs" else "no verdict"
        sides: dict[str | None, Any] = {"A": order, "B": SIDES[order == "first"], "C": "tie"}
        sent, written = (reply.counts.get(f"{way}_tokens", 0) for way in ("input", "output"))
        cost = sent * self.hparams.input_price + written * self.hparams.output_price
        return Judgement(
            pair.pair_id,
            self.name,
            order,
            verdict=sides.get(letter),
            reply=None if reply.refused else reply.text,
            cost=cost / 1_000_000,
            probabilities=probabilities,
            unread=None if letter else why,
            said=reply.text if reply.refused else "",
            asked=self.asked,
            **reply.counts,
            **about,
        )

    def _label(self, pair: Pair) -> Label:
        both = [self._known[pair.pair_id, order] for order in SIDES]
        verdicts = [j.verdict for j in both]
        choice: Any = "tie"
        reason, margin = None, None
        if None in verdicts:
            choice, reason = "skip", "a reply could not be read"
        elif self.read == "logprobs":
            # The mean over both orders of P(first response of the pair) - P(second).
            shown = [(j.order, j.probabilities) for j in both if j.probabilities]
            gaps = (p["A"] - p["B"] if order == "first" else p["B"] - p["A"] for order, p in shown)
            gap = sum(gaps) / len(both)
            margin = abs(gap)
            if margin >= self.tie_below and gap:
                choice = "first" if gap > 0 else "second"
        elif verdicts[0] == verdicts[1]:
            choice = verdicts[0]
        else:
            reason = "the two orders differ"
        return labelled(self, pair, choice, reason=reason, margin=margin)
