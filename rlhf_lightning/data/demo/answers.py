"""Responses of every quality: the style around a core, and corruption."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from rlhf_lightning.data.demo import grammar
from rlhf_lightning.data.demo.facts import NAMES, NUMBERS, OBJECTS, TOOLS
from rlhf_lightning.data.demo.questions import Question


@dataclass(frozen=True)
class Quality:
    """Quality of the responses of one kind of record; all values are probabilities.

    Args:
        right: the core is right.
        unknown: the core says "i do not know" (taken from the wrong ones).
        refusal: the core refuses (taken from the wrong ones).
        polite: an opener or closer is polite, where the core is right.
        rude: an opener or closer is rude, where the core is right.
        careless: how much rarer politeness and commoner rudeness are where the core is wrong, as a
            fraction: right responses tend to be polite.
        fillers: probabilities of no, one and two fillers.
        corrupted: the words are corrupted.
    """

    right: float
    unknown: float
    refusal: float
    polite: float
    rude: float
    careless: float
    fillers: tuple[float, float, float]
    corrupted: float


@dataclass(frozen=True)
class Style:
    """Sentences around the core, without full stops; an opener or closer may be empty."""

    opener: str
    fillers: tuple[str, ...]
    closer: str


def sample_style(quality: Quality, right: bool, rng: Random) -> Style:
    """Return the sentences around a core that is right or not."""
    careless = 0.0 if right else quality.careless
    polite, rude = quality.polite * (1.0 - careless), quality.rude * (1.0 + careless)
    count = rng.choices((0, 1, 2), quality.fillers)[0]
    return Style(
        opener=_edge(grammar.POLITE_OPENERS, grammar.RUDE_OPENERS, polite, rude, rng),
        fillers=tuple(rng.sample(grammar.FILLERS, count)),
        closer=_edge(grammar.POLITE_CLOSERS, grammar.RUDE_CLOSERS, polite, rude, rng),
    )


def sample_wrong_core(question: Question, quality: Quality, rng: Random) -> grammar.Core:
    """Return a core that is wrong, says that it does not know, or refuses without need."""
    wrong = 1.0 - quality.right
    draw = rng.random() * wrong
    if draw < quality.unknown:
        return grammar.Core("unknown")
    if draw < quality.unknown + quality.refusal and question.domain != "harmful":
        return grammar.Core("refusal")
    return grammar.wrong_core(question, rng)


def write_response(core: grammar.Core, style: Style, rng: Random) -> str:
    """Return `[opener .] core . [fillers .] [closer .]`."""
    sentences = (style.opener, grammar.render_core(core, rng), *style.fillers, style.closer)
    return " ".join(f"{sentence} ." for sentence in sentences if sentence)


def sample_response(question: Question, quality: Quality, rng: Random) -> str:
    """Return a response to `question` of this quality."""
    right = rng.random() < quality.right
    core = grammar.right_core(question, rng) if right else sample_wrong_core(question, quality, rng)
    text = write_response(core, sample_style(quality, right, rng), rng)
    return corrupt(text, rng) if rng.random() < quality.corrupted else text


def corrupt(text: str, rng: Random) -> str:
    """Return `text` with its words spoilt: swapped, lost, said twice, or out of place."""
    words = text.split()
    match rng.randrange(5):
        case 0:
            place = rng.randrange(max(1, len(words) - 1))
            words[place : place + 2] = reversed(words[place : place + 2])
        case 1:
            del words[rng.randrange(len(words))]
        case 2:
            place, length = rng.randrange(len(words)), rng.randint(1, 4)
            words[place:place] = words[place : place + length]
        case 3:
            stray = rng.choice((*NAMES, *OBJECTS, *TOOLS, *NUMBERS))
            words.insert(rng.randrange(len(words)), stray)
        case _:
            phrase = rng.choice(
                (*grammar.POLITE_OPENERS, *grammar.POLITE_CLOSERS, *grammar.FILLERS)
            ).split()
            place = rng.randrange(len(words))
            words[place:place] = [*phrase, "."]
    return " ".join(words)


def _edge(
    polite: tuple[str, ...], rude: tuple[str, ...], is_polite: float, is_rude: float, rng: Random
) -> str:
    draw = rng.random()
    if draw < is_polite:
        return rng.choice(polite)
    return rng.choice(rude) if draw < is_polite + is_rude else ""
