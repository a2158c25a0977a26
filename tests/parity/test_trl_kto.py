"""Loss and gradient of KTO next to those of TRL 1.16, on the same rows, answers and weights."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason="TRL is in the extra `dev`", exc_type=ImportError)

from trl import KTOTrainer

from rlhf_lightning.modules.dpo import pair_logprobs
from tests.builders.models import flat_gradients
from tests.builders.stages import preference_batch, tiny_dpo, without_trainer
from tests.parity.test_trl_dpo import SAME, trl_self

LABEL = torch.tensor([True, False, True, True, False, False, True, False])
WEIGHTS = {"desirable_weight": 1.5, "undesirable_weight": 0.75}


@pytest.mark.parametrize("shift", [2.0, -2.0])  # of the KL, above and below its clamp
def test_loss_gradient_and_measures_of_a_batch_are_those_of_trl(shift):
    module = without_trainer(tiny_dpo("llama", kind="kto", beta=0.3, **WEIGHTS))
    batch = replace(preference_batch(), label=LABEL)
    with torch.no_grad():
        table = torch.stack(pair_logprobs(module.policy, batch), -1)
    table = table + 2 * torch.randn(table.shape, generator=torch.Generator().manual_seed(3))
    table[:, 1] -= shift
    module.references.tables = {"train": table}
    rows = torch.tensor(float(len(batch)))
    kl = module.reference_point(batch, rows)
    assert (float(kl) > 0) == (shift > 0)
    ours, _ = module.unpaired_loss(batch, (rows, kl))
    ours.backward()
    gradient = flat_gradients(module.policy)
    module.zero_grad()

    def inputs_of(side: str, prefix: str) -> dict[str, torch.Tensor]:
        ids, mask = getattr(batch, f"{side}_input_ids"), getattr(batch, f"{side}_attention_mask")
        length = getattr(batch, f"{side}_length").unsqueeze(-1)
        answer = mask & (torch.arange(ids.shape[1]) >= mask.sum(-1, keepdim=True) - length)
        names = ("input_ids", "attention_mask", "completion_mask")
        values = (ids, mask.long(), answer.long())
        return {prefix + name: value for name, value in zip(names, values, strict=True)}

    def model(input_ids: Any, attention_mask: Any, labels: Any, **_: Any) -> Any:
        logits = module.policy.model(input_ids=input_ids, attention_mask=attention_mask).logits
        logprobs = logits[:, :-1].log_softmax(-1).gather(-1, input_ids[:, 1:, None]).squeeze(-1)
        counted = torch.where(labels[:, 1:] != -100, logprobs, 0)
        unused = torch.zeros_like(counted)
        return SimpleNamespace(log_probs=counted, entropy=unused, mean_logits=unused)

    model.training = True
    trainer = trl_self(
        calculate_KL=True, precompute_ref_logps=True, loss_type="kto", beta=0.3, **WEIGHTS
    )
    trainer._compute_kl_logps = lambda *given: KTOTrainer._compute_kl_logps(trainer, *given)
    inputs = inputs_of("chosen", "") | inputs_of("rejected", "KL_") | {"label": LABEL}
    inputs |= {"ref_logps": table[:, 0], "ref_KL_logps": table[:, 1]}
    theirs = KTOTrainer._compute_loss(trainer, model, inputs, return_outputs=False)
    theirs.backward()
    torch.testing.assert_close(ours, theirs, **SAME)
    torch.testing.assert_close(gradient, flat_gradients(module.policy), **SAME)
    assert gradient.norm() > 0.01
    (their_kl,) = trainer._metrics["train"]["kl"]
    assert float(kl) == pytest.approx(their_kl, rel=1e-4, abs=1e-6)
