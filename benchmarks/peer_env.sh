#!/bin/sh
# Makes the environment of the peer: TRL 1.12.0, the last release with a PPO trainer.
#
#   benchmarks/peer_env.sh [FOLDER]      default: benchmarks/.peer
#
# PYTHON=... chooses the interpreter (default: the project's .venv, else python3), TORCH=... what
# pip installs as torch. A build with CUDA packages is refused unless CUDA=1.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
folder=${1:-$here/.peer}
torch=${TORCH:-torch==2.13.0}
python=${PYTHON:-$here/../.venv/bin/python}
[ -x "$python" ] || python=python3

install() {
  "$folder/bin/python" -m pip install --disable-pip-version-check -q \
    -c "$here/peer_constraints.txt" "$@"
}

"$python" -m venv --clear "$folder"
if [ "${CUDA:-0}" = 0 ]; then
  report=$folder/torch.json
  install --dry-run --report "$report" "$torch"
  if grep -q '"name": "nvidia-' "$report"; then
    echo "pip would install torch with CUDA packages: show it the CPU build (PIP_INDEX_URL or" \
      "PIP_FIND_LINKS), or set CUDA=1" >&2
    exit 1
  fi
fi
install "$torch"
install trl==1.12.0
"$folder/bin/python" - <<'CHECK'
import importlib.util

import torch
import transformers
import trl
from trl.experimental.ppo import PPOTrainer

if importlib.util.find_spec("torchvision") is not None:
    raise SystemExit("torchvision got in, and nothing here needs it")
print(f"trl {trl.__version__} with {PPOTrainer.__name__}, torch {torch.__version__}, "
      f"transformers {transformers.__version__}")
CHECK
echo "the peer's interpreter: $folder/bin/python"
