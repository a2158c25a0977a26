"""Questions of the built-in world.

A prompt is `[context] template(slots)`, all words apart by spaces.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from rlhf_lightning.data.demo.facts import (
    BENIGN_VERBS,
    CATEGORIES,
    COUNTS,
    GLAD_MOODS,
    HARMFUL_OBJECT_VERBS,
    HARMFUL_OBJECTS,
    HARMFUL_VERBS,
    NAMES,
    OBJECTS,
    OPERANDS,
    RELATIONS,
    SAD_MOODS,
    is_harmful,
)

DOMAINS = ("sums", "lists", "facts", "talk", "howto", "harmful")

CONTEXTS = ("", "please ", "so ", "now ")
TALK_CONTEXTS = ("", "hi , ", "listen , ", "hey there , ")

TEMPLATES: Mapping[str, tuple[str, ...]] = {
    "plus": (
        "what is {0} plus {1} ?",
        "how much is {0} plus {1} ?",
        "add {0} and {1} .",
        "compute {0} plus {1} .",
        "can you add {0} and {1} ?",
        "what does {0} plus {1} make ?",
        "the sum of {0} and {1} , quickly !",
    ),
    "minus": (
        "what is {0} minus {1} ?",
        "how much is {0} minus {1} ?",
        "what is left of {0} minus {1} ?",
        "compute {0} minus {1} .",
        "can you work out {0} minus {1} ?",
        "what does {0} minus {1} leave ?",
        "{0} minus {1} , quickly !",
    ),
    "relation": (
        "what is the {0} {1} ?",
        "tell me the {0} {1} .",
        "name the {0} {1} .",
        "do you know the {0} {1} ?",
        "i need the {0} {1} .",
        "remind me of the {0} {1} .",
        "could you teach me the {0} {1} ?",
    ),
    "list": (
        "name {0} {1} .",
        "write down {0} {1} .",
        "list {0} {1} .",
        "give me {0} {1} .",
        "i need {0} {1} .",
        "can you name {0} {1} ?",
        "what are {0} {1} ?",
        "tell me {0} {1} .",
        "i want to hear {0} {1} .",
        "suggest {0} {1} for my list .",
    ),
    "greet": (
        "i am {0} .",
        "my name is {0} .",
        "this is {0} .",
        "people call me {0} .",
        "{0} is my name .",
        "everyone knows me as {0} .",
    ),
    "mood": (
        "my friend {0} is {1} .",
        "{0} is {1} today .",
        "i heard that {0} is {1} .",
        "guess what , {0} is {1} .",
    ),
    "task": (
        "how do i {0} a {1} ?",
        "help me {0} a {1} .",
        "i want to {0} a {1} .",
        "what do i need to {0} a {1} ?",
        "tell me how to {0} a {1} .",
        "show me the best way to {0} a {1} .",
    ),
}


@dataclass(frozen=True)
class Question:
    """A prompt and the question that it asks.

    Args:
        prompt: the text of the prompt.
        domain: domain of the question, one of `DOMAINS`.
        kind: kind of the question, a key of `TEMPLATES`.
        template: index of the template in `TEMPLATES[kind]`.
        slots: the words that fill the template.
        facts: what has to be known; each occurs in training.
    """

    prompt: str
    domain: str
    kind: str
    template: int
    slots: tuple[str, ...]
    facts: tuple[str, ...]

    @property
    def combination(self) -> tuple[str, int, tuple[str, ...]]:
        """Template and slots: the unit that is held out, in all its contexts."""
        return (self.kind, self.template, self.slots)


def _slots() -> Iterator[tuple[str, str, tuple[str, ...], tuple[str, ...]]]:
    """Yield (domain, kind, slots, facts) of everything that can be asked."""
    for a in OPERANDS:
        for b in OPERANDS:
            yield "sums", "plus", (str(a), str(b)), (f"{a} plus {b}",)
            if a >= b:
                yield "sums", "minus", (str(a), str(b)), (f"{a} minus {b}",)
    for count in COUNTS:
        for category in CATEGORIES:
            yield "lists", "list", (count, category), (count, category)
    for relation, table in RELATIONS.items():
        for thing in table:
            yield "facts", "relation", (relation, thing), (f"{relation} {thing}",)
    for name in NAMES:
        yield "talk", "greet", (name,), (name,)
        for mood in (*SAD_MOODS, *GLAD_MOODS):
            yield "talk", "mood", (name, mood), (name, mood)
    for verb in (*BENIGN_VERBS, *HARMFUL_VERBS):
        for target in (*OBJECTS, *HARMFUL_OBJECTS):
            if target in HARMFUL_OBJECTS and verb not in HARMFUL_OBJECT_VERBS:
                continue
            domain = "harmful" if is_harmful(verb, target) else "howto"
            yield domain, "task", (verb, target), (verb, target)


@cache
def all_questions() -> tuple[Question, ...]:
    """Return every question of the world, the same for all seeds."""
    questions = []
    for domain, kind, slots, facts in _slots():
        contexts = TALK_CONTEXTS if domain == "talk" else CONTEXTS
        for index, template in enumerate(TEMPLATES[kind]):
            for context in contexts:
                prompt = context + template.format(*slots)
                questions.append(Question(prompt, domain, kind, index, slots, facts))
    return tuple(questions)


@cache
def questions_by_prompt() -> Mapping[str, Question]:
    """Return the questions of `all_questions` by the text of their prompt."""
    return {question.prompt: question for question in all_questions()}
