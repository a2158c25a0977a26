#!/usr/bin/env bash
# torchmetrics 1.9.0: the calibration error with n_bins=10 has 11 bins; a probability of exactly 1.0 is in the last one alone.
#
# A reward model states the probability of a preference as sigmoid(difference of the scores), which is exactly 1.0 in float32 from a
# difference of about 17. Such pairs belong with the others from 0.9 to 1.0; they have a bin of their own, so that gaps that
# cancel within a bin are added up. Scores that are cut at 16, which moves a probability by 1e-7, have a third of the error. With one bin
# the error must be |mean probability - share that is right|; it is not.
# The bin is torch.bucketize(p, linspace(0, 1, n_bins + 1), right=True) - 1, which is n_bins for p = 1, and the sums have n_bins + 1
# places, so that nothing fails. p = 0 falls into the first bin: the two ends are treated differently.
#
# Seen: one bin, [0.5, 0.5, 1, 1] with 3 of 4 right: 0.5 (0 expected); with 1 - 1e-6 for 1: 0.0. Ten bins, six pairs of 0.92 and six of
#   a difference of 20, 11 of 12 right: 0.1233; cut at 16: 0.0433.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --no-compile 'torch==2.13.0' 'torchmetrics==1.9.0' 2>/dev/null
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import torch
from torchmetrics.classification import BinaryCalibrationError, MulticlassCalibrationError
from torchmetrics.functional.classification import binary_calibration_error


def one_bin(probabilities, right):
    return float(binary_calibration_error(torch.tensor(probabilities), torch.tensor(right), n_bins=1))


exact, nearly = one_bin([0.5, 0.5, 1.0, 1.0], [1, 1, 0, 1]), one_bin([0.5, 0.5, 1 - 1e-6, 1 - 1e-6], [1, 1, 0, 1])
print(f"one bin, mean probability = share right = 0.75: {exact:.4f}; with 1 - 1e-6 for 1: {nearly:.4f}")
assert exact == 0.5 and nearly < 1e-5, "the behaviour has changed"

# Six pairs of 0.92, all right, and six of a difference of 20, whose sigmoid is exactly 1, of which five are right.
difference = torch.tensor([0.92] * 6).logit().tolist() + [20.0] * 6
right = torch.tensor([1] * 11 + [0])
measured = {}
for name, scores in {"as they are": torch.tensor(difference), "cut at 16": torch.tensor(difference).clamp(max=16)}.items():
    metric = BinaryCalibrationError(n_bins=10)
    metric.update(scores.sigmoid(), right)
    measured[name] = round(float(metric.compute()), 4)
print("ten bins:", measured)
assert measured == {"as they are": 0.1233, "cut at 16": 0.0433}, "the behaviour has changed"

# Softmax saturates in the same way.
metric = MulticlassCalibrationError(num_classes=2, n_bins=1)
metric.update(torch.tensor([[0.5, 0.5], [0.5, 0.5], [1.0, 0.0], [1.0, 0.0]]), torch.tensor([0, 0, 1, 0]))
print(f"two classes, one bin: {float(metric.compute()):.4f}")
assert metric.compute() == 0.5, "the behaviour has changed"
PY
