#!/usr/bin/env bash
# reasoning-gym 0.1.25: data sets of neighbouring seeds are nearly the same questions, and the endless data set repeats itself.
#
# Question i of a data set is drawn with random.Random(seed + i). A training set with the seed 42 and a held-out set with the seed 43
# therefore share every question but the ends, one place apart: a test on a "different seed" measures memory. ReseedingDataset, which
# makes a set endless, gives chunk n the seed + n: each chunk of 500 repeats 499 questions of the chunk before.
# Seeds have to differ by more than the size.
#
# Seen: of the 100 questions of the seed 43, 100 are among the 400 of the seed 42; of the first 5000 of the endless set 505 differ.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --no-compile 'reasoning-gym==0.1.25' 2>/dev/null
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
from itertools import islice

from reasoning_gym import create_dataset
from reasoning_gym.dataset import ReseedingDataset

for name in ("chain_sum", "spell_backward", "propositional_logic"):
    train = [row["question"] for row in create_dataset(name, seed=42, size=400)]
    held_out = [row["question"] for row in create_dataset(name, seed=43, size=100)]
    far = [row["question"] for row in create_dataset(name, seed=10_000, size=100)]
    shared, by_chance = (len(set(train) & set(rows)) for rows in (held_out, far))
    print(f"{name}: {shared} of {len(set(held_out))} held-out questions are in training; with a far seed {by_chance}")
    assert held_out == train[1:101] and by_chance < 20, "the behaviour has changed"

endless = ReseedingDataset(create_dataset("chain_sum", seed=42, size=500), chunk_size=500)
drawn = [row["question"] for row in islice(endless, 5000)]
print(f"ReseedingDataset: {len(set(drawn))} different questions among the first {len(drawn)}")
assert drawn[500:999] == drawn[1:500] and len(set(drawn)) < 520, "the behaviour has changed"
PY
