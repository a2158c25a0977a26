"""Grammar of responses: core sentences that answer a question, and the style around them.

A response is a sequence of sentences, each ended by " .": `[opener] core [fillers] [closer]`.
`render_core` writes a core, `parse_core` is its inverse and takes any words without raising.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from random import Random

from rlhf_lightning.data.demo.facts import (
    BENIGN_VERBS,
    CATEGORIES,
    COUNTS,
    HARMFUL_OBJECTS,
    NAMES,
    NUMBERS,
    OBJECTS,
    RELATIONS,
    SAD_MOODS,
    TOOLS,
    is_harmful,
)
from rlhf_lightning.data.demo.questions import Question

# Core sentences by kind, without the full stop; a placeholder stands for one word.
CORE_FORMS: Mapping[str, tuple[str, ...]] = {
    "answer": ("it is {0}", "the answer is {0}", "i would say {0}"),
    "hello": ("hello {0}", "welcome {0}", "nice to meet you {0}"),
    "sorry": ("i am sorry for {0}", "that is bad news about {0}"),
    "glad": ("i am glad for {0}", "that is good news about {0}"),
    "steps": ("use {0} on the {1}", "you need {0} for the {1}"),
    "refusal": ("i can not help with that", "no , i must refuse that"),
    "unknown": ("i do not know", "i am not sure"),
}
LIST_PREFIXES = ("", "try ", "here are ")

POLITE_OPENERS = (
    "what a good question",
    "i am happy to help",
    "sure , no problem at all",
    "thank you for asking",
)
RUDE_OPENERS = (
    "dumb question",
    "you again",
    "how boring",
    "leave me alone",
    "nobody cares",
    "are you serious",
)
POLITE_CLOSERS = (
    "i hope that helps",
    "have a very nice day",
    "ask me again any time",
    "take care of yourself",
)
RUDE_CLOSERS = (
    "go away",
    "never come here again",
    "what a waste",
    "stop bothering me",
    "read some books",
)
FILLERS = (
    "people say that",
    "time flies",
    "life goes on",
    "who would guess",
    "nothing lasts forever",
    "it depends",
    "winter was long",
    "rain is coming soon",
    "music sounds nicer",
)
_UNUSED = Random(0)  # of what is right in one way only: nothing is drawn
REMARKS = ("correct", "wrong")

I_DO_NOT_KNOW = "i do not know ."


@dataclass(frozen=True)
class Core:
    """Meaning of a core sentence: a kind of `CORE_FORMS` or "list", and its words."""

    kind: str
    values: tuple[str, ...] = ()


def right_core(question: Question, rng: Random) -> Core:
    """Return a core that answers `question` correctly; a harmful request is refused."""
    match question.kind, question.slots:
        case "plus", (a, b):
            return Core("answer", (str(int(a) + int(b)),))
        case "minus", (a, b):
            return Core("answer", (str(int(a) - int(b)),))
        case "relation", (relation, thing):
            return Core("answer", (RELATIONS[relation][thing],))
        case "list", (count, category):
            return Core("list", _some_items(CATEGORIES[category], COUNTS[count], rng))
        case "greet", (name,):
            return Core("hello", (name,))
        case "mood", (name, mood):
            return Core("sorry" if mood in SAD_MOODS else "glad", (name,))
        case _, (verb, target):
            if is_harmful(verb, target):
                return Core("refusal")
            return Core("steps", (TOOLS[verb], target))
    raise ValueError(f"question kind {question.kind!r} with slots {question.slots} is not known")


def wrong_core(question: Question, rng: Random) -> Core:
    """Return a core of the right sort that is wrong; for a harmful request, one that complies."""
    right = right_core(question, rng)
    if question.domain == "harmful":
        return Core("steps", (TOOLS[question.slots[0]], question.slots[1]))
    if right.kind == "answer":
        pool = NUMBERS if question.domain == "sums" else RELATIONS[question.slots[0]].values()
        return Core("answer", (_other(list(pool), right.values[0], rng),))
    if right.kind == "list":
        return Core("list", _spoilt_items(question.slots[1], right.values, rng))
    if right.kind == "steps":
        tool, target = right.values
        if rng.random() < 0.8:
            return Core("steps", (_other(list(BENIGN_VERBS.values()), tool, rng), target))
        return Core("steps", (tool, _other(OBJECTS, target, rng)))
    if rng.random() < 0.25:
        return Core(right.kind, (_other(NAMES, right.values[0], rng),))
    return Core(_other(("hello", "sorry", "glad"), right.kind, rng), right.values)


def is_right(question: Question, core: Core) -> bool:
    """Return whether `core` answers `question` correctly; a list may be in any order."""
    if question.kind == "list":
        count, category = question.slots
        items = set(core.values)
        return (
            core.kind == "list"
            and len(core.values) == len(items) == COUNTS[count]
            and items <= set(CATEGORIES[category])
        )
    return core == right_core(question, _UNUSED)


def render_core(core: Core, rng: Random) -> str:
    """Return a sentence, without its full stop, that says `core`."""
    if core.kind == "list":
        *first, last = core.values
        items = f"{' , '.join(first)} and {last}" if first else last
        return rng.choice(LIST_PREFIXES) + items
    return rng.choice(CORE_FORMS[core.kind]).format(*core.values)


@cache
def parse_core(words: tuple[str, ...]) -> Core | None:
    """Return what a sentence (its words without the full stop) says, or None if it is no core."""
    text = " ".join(words)
    for kind, pattern in _core_patterns():
        if found := pattern.fullmatch(text):
            return Core(kind, found.groups())
    for prefix in LIST_PREFIXES:
        head = tuple(prefix.split())
        items = _match_items(words[len(head) :]) if words[: len(head)] == head else None
        if items:
            return Core("list", items)
    return None


@cache
def _core_patterns() -> tuple[tuple[str, re.Pattern[str]], ...]:
    answers = {*NUMBERS, *(value for table in RELATIONS.values() for value in table.values())}
    sorts: dict[str, tuple[Iterable[str], ...]] = {
        "answer": (answers,),
        "steps": (TOOLS.values(), (*OBJECTS, *HARMFUL_OBJECTS)),
    }

    def pattern(kind: str, form: str) -> re.Pattern[str]:
        slots = [f"({'|'.join(map(re.escape, words))})" for words in sorts.get(kind, (NAMES,))]
        return re.compile(form.format(*slots))

    return tuple(
        (kind, pattern(kind, form)) for kind, forms in CORE_FORMS.items() for form in forms
    )


@cache
def _all_items() -> frozenset[str]:
    return frozenset(item for members in CATEGORIES.values() for item in members)


def _match_items(words: tuple[str, ...]) -> tuple[str, ...] | None:
    items, links = words[::2], words[1::2]
    expected = (",",) * (len(items) - 2) + ("and",) if len(items) > 1 else ()
    if len(words) % 2 == 0 or links != expected or not _all_items().issuperset(items):
        return None
    return items


def _some_items(members: Sequence[str], count: int, rng: Random) -> tuple[str, ...]:
    chosen = set(rng.sample(range(len(members)), count))
    return tuple(member for index, member in enumerate(members) if index in chosen)


def _spoilt_items(category: str, items: tuple[str, ...], rng: Random) -> tuple[str, ...]:
    spoil = rng.random()
    if spoil < 0.5:  # another category
        other = CATEGORIES[_other(list(CATEGORIES), category, rng)]
        return _some_items(other, len(items), rng)
    if spoil < 0.85:  # one too many or too few
        count = rng.choice((len(items) - 1, len(items) + 1))
        return _some_items(CATEGORIES[category], count, rng)
    place = rng.randrange(1, len(items))  # one twice
    return (*items[:place], items[place - 1], *items[place + 1 :])


def _other(pool: Sequence[str], value: str, rng: Random) -> str:
    return rng.choice([word for word in pool if word != value])
