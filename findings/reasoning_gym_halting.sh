#!/usr/bin/env bash
# reasoning-gym 0.1.25: game_of_life_halting gives the full reward to "True" and to "False", whichever is right.
#
# The question ends with "If it will halt, reply 'True'. If it won't halt, reply 'False'", and the answer of an entry is one of these
# words. Guess: score_answer is 1 for that word and 0 for the other, as its docstring says ("1.0 for a correct answer") and as other
# questions with two answers (syllogism, circuit_logic) have it. It is 1 for both, and for any other text: in RL every response of a
# prompt has the same reward, so that nothing is learnt from it, and an evaluation says 100 %. In a mixture nobody sees it.
# It compares bool(answer) with bool(entry["answer"]). Both are texts, and a text is true unless it is empty.
#
# Seen: of 40 questions, 22 of them "False", right with "True" 40, with "False" 40, with "I do not know" 40; of 40 of syllogism
#   "Yes" 27 and "No" 13; of 40 of circuit_logic "0" 23 and "1" 17.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --no-compile 'reasoning-gym==0.1.25' 2>/dev/null
cd "$folder"
"$folder/venv/bin/python" - 2>/dev/null <<'PY'
from collections import Counter

from reasoning_gym import create_dataset


def right(name, *said):
    """How many of 40 answers are each of the words, and how many questions are scored 1 with it."""
    questions = create_dataset(name, seed=1, size=40)
    answers = Counter(entry["answer"] for entry in questions)
    scored = [sum(questions.score_answer(word, entry) == 1.0 for entry in questions) for word in said]
    print(f"{name}: answers {dict(answers)}, right with", dict(zip(said, scored, strict=True)))
    return [answers[word] for word in said], scored


answers, scored = right("game_of_life_halting", "True", "False", "I do not know")
assert min(answers[:2]) > 10 and scored == [40, 40, 40], "the behaviour has changed"
for name, *said in (("syllogism", "Yes", "No"), ("circuit_logic", "0", "1")):
    answers, scored = right(name, *said)
    assert answers == scored and sum(scored) == 40, "the behaviour has changed"
PY
