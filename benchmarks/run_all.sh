#!/bin/sh
# Measures every figure of benchmarks/README.md and fills its tables.
#
#   benchmarks/run_all.sh [cpu|cuda] [options for every benchmark, such as --lock FILE]
#
# On two CPU cores this takes about two hours, most of it TRL's PPO iterations.
set -eu
cd "$(dirname "$0")/.."
device=${1:-cpu}
[ $# -eq 0 ] || shift
python=.venv/bin/python
[ -x "$python" ] || python=python3
measure() {
  name=$1
  shift
  echo "== $name $*"
  "$python" -m "benchmarks.$name" --device "$device" "$@"
}
if [ "$device" = cuda ]; then
  shape=1b
else
  shape=135m
  measure ppo_iteration --shape 10m --warmup 1 --iterations 3 "$@"
  measure scaling --shape 10m "$@"
fi
measure ppo_iteration --shape $shape "$@"
measure update_rate --shape $shape --profile "$@"
measure generation --shape $shape "$@"
measure sft_reward_steps --shape $shape "$@"
measure logprob_memory "$@"
"$python" -m benchmarks.tables
