#!/usr/bin/env bash
# lightning 2.6.6: EMAWeightAveraging(update_every_n_steps=2) with two optimizers never averages, and gives the trained model its first weights.
#
# An actor and a critic have an optimizer each (manual optimization). Guess: with update_every_n_steps=2 the average takes in the
# weights of every other batch, and the model has the average at the end. global_step counts the steps of both optimizers, so that the
# callback, which looks once a batch, sees the steps 1, 3, 5, ... counted from 0, and asks step % 2 == 0: never. The average stays the
# copy of the model that was made before training. Validation measures this copy, the checkpoints hold it as state_dict, and
# when training ends it is written over the trained weights. Losses look well, and there is no warning. The same happens with one optimizer
# that takes two steps a batch, as PPO does with minibatches. With an odd number of steps a batch it averages, at other batches than said.
#
# Seen: a weight that goes up by 1 a batch, 8 batches, decay 0 (the average is the last weight taken in), n = 2: 7.0 with one step a batch,
#   0.0 with two optimizers, 0.0 with one optimizer and two steps; with n = 1: 8.0 each. Validation sees the same weights.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --no-compile 'torch==2.13.0' 'lightning==2.6.6' 2>/dev/null
cd "$folder"
"$folder/venv/bin/python" - 2>"$folder/log" <<'PY' || { cat "$folder/log"; exit 1; }
import lightning as L
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging


class Counter(L.LightningModule):
    """Weights that go up by 1 a batch, in one step each or in `steps` smaller ones."""

    def __init__(self, optimizers, steps):
        super().__init__()
        self.automatic_optimization = False
        self.weights = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(())) for _ in range(optimizers))
        self.steps, self.validated = steps, []

    def training_step(self, batch, batch_idx):
        optimizers = self.optimizers()
        for optimizer, weight in zip(optimizers if isinstance(optimizers, list) else [optimizers], self.weights):
            for _ in range(self.steps):
                optimizer.zero_grad()
                self.manual_backward(-weight / self.steps)
                optimizer.step()

    def validation_step(self, batch, batch_idx):
        self.validated.append(self.weights[0].item())

    def configure_optimizers(self):
        return [torch.optim.SGD([weight], lr=1.0) for weight in self.weights]


seen = {}
for optimizers, steps in ((1, 1), (2, 1), (1, 2)):
    for every in (1, 2):
        module = Counter(optimizers, steps)
        trainer = L.Trainer(
            max_epochs=1, val_check_interval=4, num_sanity_val_steps=0, accelerator="cpu", logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            callbacks=[EMAWeightAveraging(decay=0.0, update_every_n_steps=every)],
        )
        trainer.fit(module, torch.zeros(8, 1), torch.zeros(1, 1))
        seen[optimizers, steps, every] = module.validated, module.weights[0].item()
        print(f"{optimizers} optimizers, {steps} steps a batch, every {every}: validated {module.validated},"
              f" after training {[weight.item() for weight in module.weights]}")
assert all(seen[o, s, 1] == ([4.0, 8.0], 8.0) for o, s in ((1, 1), (2, 1), (1, 2))), "the behaviour has changed"
assert seen[1, 1, 2] == ([3.0, 7.0], 7.0), "the behaviour has changed"
assert seen[2, 1, 2] == seen[1, 2, 2] == ([0.0, 0.0], 0.0), "the behaviour has changed"
PY
