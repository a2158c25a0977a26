#!/bin/sh
# Everything that only CUDA can show, in order of worth, on a machine with GPUs and no network.
#
#   benchmarks/gpu_day.sh wheels [--have FILE]    where there is a network: fetch what it lacks
#   benchmarks/gpu_day.sh                         there: every part that has no result yet
#   benchmarks/gpu_day.sh --minutes 9             stop in time, go on with the same command
#   benchmarks/gpu_day.sh quick                   here: the same parts, tiny, without CUDA
#
# PYTHON is the interpreter with a CUDA build of torch; README.md says what each part shows.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
command -v "$python" > /dev/null || python=python3
if [ "${1:-}" = wheels ]; then
  shift
  exec "$python" -m benchmarks.carried_wheels "$@"
fi
exec "$python" -m benchmarks.gpu_day "$@"
