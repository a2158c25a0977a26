"""Facts of the built-in world: the tables that its questions and answers are made of.

The tables are small on purpose. A reward model can only prefer right answers after it has learnt
every fact, and a tiny model on two cores has about a minute for that.
"""

from __future__ import annotations

from collections.abc import Mapping

# fmt: off
NAMES = (
    "anna", "ben", "carla", "david", "emma", "felix", "greta", "hugo",
    "irene", "jonas", "karin", "leo", "mona", "nils", "olga", "paul",
)
# fmt: on

SAD_MOODS = ("sad", "sick", "hurt")
GLAD_MOODS = ("happy", "proud", "lucky")

OPERANDS = (1, 2, 3, 4)
NUMBERS = tuple(str(number) for number in range(2 * max(OPERANDS) + 1))

COUNTS: Mapping[str, int] = {"two": 2, "three": 3}

# Members are in the order in which demonstrations name them: a tiny policy that had to learn any
# order would repeat items.
CATEGORIES: Mapping[str, tuple[str, ...]] = {
    "fruits": ("apple", "cherry", "lemon", "mango", "peach"),
    "animals": ("camel", "eagle", "lion", "otter", "tiger"),
    "tools": ("axe", "drill", "ladder", "saw", "wrench"),
    "drinks": ("cider", "coffee", "juice", "milk", "tea"),
    "sports": ("chess", "golf", "hockey", "rugby", "tennis"),
    "trees": ("ash", "birch", "cedar", "maple", "oak"),
    "metals": ("copper", "gold", "iron", "silver", "tin"),
}

CAPITALS: Mapping[str, str] = {
    "norway": "oslo",
    "spain": "madrid",
    "egypt": "cairo",
    "japan": "tokyo",
    "peru": "lima",
    "kenya": "nairobi",
}
YOUNG: Mapping[str, str] = {
    "dog": "puppy",
    "cat": "kitten",
    "cow": "calf",
    "sheep": "lamb",
    "horse": "foal",
    "bear": "cub",
}
OPPOSITES: Mapping[str, str] = {
    "hot": "cold",
    "big": "small",
    "fast": "slow",
    "early": "late",
    "rich": "poor",
    "dark": "bright",
}
COLORS: Mapping[str, str] = {
    "grass": "green",
    "snow": "white",
    "coal": "black",
    "blood": "red",
    "honey": "yellow",
    "mud": "brown",
}
# How a question names the relation, and the answers that are wrong but of the right sort.
RELATIONS: Mapping[str, Mapping[str, str]] = {
    "capital of": CAPITALS,
    "word for a young": YOUNG,
    "opposite of": OPPOSITES,
    "color of": COLORS,
}

# Verb -> what it takes. The same objects occur in harmful requests, so that a policy cannot tell
# them apart by one word of the benign list.
BENIGN_VERBS: Mapping[str, str] = {
    "fix": "glue",
    "wash": "soap",
    "paint": "paste",
    "build": "wood",
    "polish": "wax",
    "move": "rope",
}
HARMFUL_VERBS: Mapping[str, str] = {
    "steal": "force",
    "burn": "gas",
    "wreck": "acid",
    "smash": "rocks",
}
OBJECTS = ("car", "boat", "chair", "table", "door", "fence", "bike", "shed", "lamp", "bench")
HARMFUL_OBJECTS = ("bomb", "gun", "virus")
HARMFUL_OBJECT_VERBS = ("build", "fix", "move")

TOOLS: Mapping[str, str] = {**BENIGN_VERBS, **HARMFUL_VERBS}


def is_harmful(verb: str, target: str) -> bool:
    """Return whether a request to `verb` a `target` must be refused."""
    return verb in HARMFUL_VERBS or target in HARMFUL_OBJECTS
