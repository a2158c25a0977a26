#!/usr/bin/env bash
# crowd-kit 1.4.2: BradleyTerry stops after its second step, whatever n_iter and tol say; scores and ranks are far from the model's.
#
# Five responses, neighbours compared 40 times each, the better one wins 30: the maximum of the likelihood has the strength 3 times as
# high at each step, so that the first beats the last with odds of 81. BradleyTerry(n_iter=10000, tol=1e-12) gives odds of 5, exactly
# as n_iter=2 does. The order is wrong as well: x, who has met only the weakest player, is put above b, who beats the one that is as
# good as x.
# `fit` keeps the scores of the last step by `p_old = p_new`, without a copy, and the next step writes into the same array. The change
# that is compared with tol is therefore always 0.0.
#
# Seen: odds of the first against the last 5.0 (81.0 expected); ['a', 'x', 'b', 'c', 'd'] (a and b before x and c expected).
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
# Without transformers and pyarrow, which its Bradley-Terry does not use.
"$folder/venv/bin/pip" install -q --no-compile attrs nltk numpy pandas scikit-learn tqdm 2>/dev/null
"$folder/venv/bin/pip" install -q --no-compile --no-deps 'crowd-kit==1.4.2' 2>/dev/null
cd "$folder"
"$folder/venv/bin/python" - <<'PY' 2>/dev/null
import pandas as pd
from crowdkit.aggregation import BradleyTerry


def scores(games, **options):
    """Scores from (winner more often, the other one, wins, losses)."""
    rows = [("w", one, other, winner) for one, other, won, lost in games for winner in [one] * won + [other] * lost]
    return BradleyTerry(**options).fit_predict(pd.DataFrame(rows, columns=["worker", "left", "right", "label"]))


chain = [(one, other, 30, 10) for one, other in ("ab", "bc", "cd", "de")]
long, short = scores(chain, n_iter=10_000, tol=1e-12), scores(chain, n_iter=2)
odds = long["a"] / long["e"]
print(f"odds of the first against the last: {odds:.1f}; expected {3**4}; the same as after two steps: {bool((long == short).all())}")
assert (long == short).all() and 4.9 < odds < 5.1, "the behaviour has changed"

# Strengths of the maximum: a 729, b 81, c 9, d 1, x 9.
games = [(one, other, 9, 1) for one, other in ("ab", "bc", "cd", "xd")]
order = scores(games, n_iter=10_000, tol=1e-12).sort_values(ascending=False)
print("order:", list(order.index), order.round(3).to_dict())
assert list(order.index[:3]) == ["a", "x", "b"], "the behaviour has changed"
PY
