#!/usr/bin/env bash
# hydra-optuna-sweeper 1.3.0 (hydra-core 1.3.8, optuna 2.10.1): the same `range(...)` has other values under Optuna, and under its grid others again.
#
# Hydra's own sweep of x=range(1,4) runs 1, 2, 3 and leaves the end out, as Python does. With hydra/sweeper=optuna it draws 1, 2, 3
# and 4: a value that the range excludes is trained. With shuffle(range(1,4)) the end is out again. Optuna's GridSampler drops the
# last value that is inside: x=range(1,8,3) is 1, 4, 7 in Hydra, and 1, 4 on the grid.
# The plugin hands start and stop to IntUniformDistribution, whose upper end belongs to it; for the grid it makes
# (high - low) // step values, where Optuna has already rounded `high` down to the last step.
#
# Seen: x=range(1,4): hydra [1, 2, 3], sampler [1, 2, 3, 4], shuffled [1, 2, 3], grid [1, 2, 3];
#   x=range(1,8,3): hydra [1, 4, 7], grid [1, 4].
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --no-compile 'hydra-optuna-sweeper==1.3.0' 'hydra-core==1.3.8' 'optuna==2.10.1' 'sqlalchemy<2' \
  'alembic<1.13' 'setuptools<81' 2>/dev/null
cd "$folder"
cat > app.py <<'PY'
import hydra
from omegaconf import DictConfig


@hydra.main(version_base="1.3", config_path=None, config_name="config")
def main(cfg: DictConfig) -> float:
    with open(cfg.out, "a") as file:
        file.write(f"{cfg.x}\n")
    return float(cfg.x)


hydra.core.config_store.ConfigStore.instance().store("config", {"x": 0, "out": ""})
main()
PY
values() {  # of x, in the order of size
  rm -f "$folder/out"
  "$folder/venv/bin/python" app.py -m out="$folder/out" hydra.sweep.dir="$folder/runs" hydra.run.dir="$folder/run" "$@" >"$folder/log" 2>&1 \
    || { cat "$folder/log"; exit 1; }
  sort -nu "$folder/out" | paste -sd,
}
check() { echo "$1: $3"; [ "$2" = "$3" ] || { echo "the behaviour has changed: $2 was seen"; exit 1; }; }
optuna="hydra/sweeper=optuna hydra.sweeper.n_trials=15"
check "x=range(1,4)   hydra   " 1,2,3 "$(values 'x=range(1,4)')"
check "x=range(1,4)   sampler " 1,2,3,4 "$(values 'x=range(1,4)' $optuna hydra.sweeper.sampler.seed=1)"
check "x=range(1,4)   shuffled" 1,2,3 "$(values 'x=shuffle(range(1,4))' $optuna hydra.sweeper.sampler.seed=1)"
check "x=range(1,4)   grid    " 1,2,3 "$(values 'x=range(1,4)' $optuna hydra/sweeper/sampler=grid)"
check "x=range(1,8,3) hydra   " 1,4,7 "$(values 'x=range(1,8,3)')"
check "x=range(1,8,3) grid    " 1,4 "$(values 'x=range(1,8,3)' $optuna hydra/sweeper/sampler=grid)"
