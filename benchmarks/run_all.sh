#!/bin/sh
# Measures every figure of benchmarks/README.md and fills its tables.
#
#   benchmarks/run_all.sh [options for every benchmark, such as --lock FILE]
#
# On two CPU cores this takes about two hours, most of it TRL's PPO iterations. On CUDA:
# benchmarks/gpu_day.sh.
set -eu
cd "$(dirname "$0")/.."
python=.venv/bin/python
[ -x "$python" ] || python=python3
measure() {
  name=$1
  shift
  echo "== $name $*"
  "$python" -m "benchmarks.$name" "$@"
}
measure ppo_iteration --shape 10m --warmup 1 --iterations 3 "$@"
measure scaling --shape 10m "$@"
measure ppo_iteration "$@"
measure update_rate --profile "$@"
measure generation "$@"
measure sft_reward_steps "$@"
measure logprob_memory "$@"
"$python" -m benchmarks.tables
