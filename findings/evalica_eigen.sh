#!/usr/bin/env bash
# evalica 0.4.2: `eigen` puts the worst model first; the order of a round robin is turned round, with both solvers.
#
# Four models, each pair compared 40 times; the better one wins 30, 36 or 39. Guess: `evalica.eigen` orders them as bradley_terry, elo,
# counting, average_win_rate, newman and pagerank of the same module do, which all return `scores` with the best first. The eigenvector
# of wins is the score of a tournament since Wei and Kendall: who beats strong players is strong. Without ties, without gaps, and
# converged: limit=10000 gives the same.
# matrix[i, j] counts the wins of i over j, and `eigen` iterates with its transpose: it scores each model by those that it lost to.
#
# Seen: eigen ['d', 'c', 'b', 'a'], all others ['a', 'b', 'c', 'd']; numpy's eigenvector of wins a, b, c, d, of losses d, c, b, a.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --no-compile 'evalica==0.4.2' 'numpy==2.4.6' 'pandas==3.1.1' 2>/dev/null
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import evalica
import numpy as np
from evalica import Winner

names = "abcd"
wins = {"ab": 30, "bc": 30, "cd": 30, "ac": 36, "bd": 36, "ad": 39}  # of the first, in 40 games
games = [(*pair, winner) for pair, won in wins.items() for winner in [Winner.X] * won + [Winner.Y] * (40 - won)]
columns = tuple(zip(*games, strict=True))
others = [evalica.bradley_terry, evalica.newman, evalica.elo, evalica.counting, evalica.average_win_rate, evalica.pagerank]
for solver in ("pyo3", "naive"):
    orders = {method.__name__: "".join(method(*columns, solver=solver).scores.index) for method in others}
    eigen = evalica.eigen(*columns, solver=solver, limit=10_000)
    print(solver, "eigen", eigen.scores.round(3).to_dict(), "others", orders)
    assert list(eigen.scores.index) == list("dcba"), "the behaviour has changed"
    assert set(orders.values()) == {"abcd"}, "the behaviour has changed"

table = np.zeros((4, 4))
for (one, other), won in wins.items():
    table[names.index(one), names.index(other)] = won
    table[names.index(other), names.index(one)] = 40 - won
for what, matrix in {"wins": table, "losses": table.T}.items():
    values, vectors = np.linalg.eig(matrix)
    vector = np.abs(vectors[:, values.real.argmax()].real)
    print(f"eigenvector of {what}:", dict(zip(names, vector.round(3).tolist(), strict=True)))
    same = np.allclose(vector, eigen.scores[list(names)], atol=1e-3)
    assert same == (what == "losses"), "the behaviour has changed"
PY
