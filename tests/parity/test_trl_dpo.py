"""Loss and gradient of `DPOModule` next to those of TRL 1.16, on the same pairs and weights.

TRL's sigmoid loss knows no label smoothing: that is held against its formula in tests/modules.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason="TRL is in the extra `dev`", exc_type=ImportError)

from trl import DPOTrainer

from rlhf_lightning.modules.dpo import pair_logprobs
from tests.builders.models import flat_gradients
from tests.builders.stages import preference_batch, tiny_dpo, without_trainer

SAME = {"rtol": 1e-4, "atol": 1e-6}


def trl_self(**settings: Any) -> Any:
    """Return what `DPOTrainer._compute_loss` reads of its trainer, on one process."""
    accelerator = SimpleNamespace(
        reduce=lambda x, reduction: x,
        gather=lambda x: x,
        gather_for_metrics=lambda x: x,
        num_processes=1,
        device=torch.device("cpu"),
    )
    return SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=accelerator,
        aux_loss_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0,
        _tp_size=1,
        **settings,
    )


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_loss_and_gradient_of_a_batch_are_those_of_trl(model_type):
    module = without_trainer(tiny_dpo(model_type, beta=0.3))
    batch = preference_batch()
    with torch.no_grad():
        table = torch.stack(pair_logprobs(module.policy, batch), -1)
    table = table + 2 * torch.randn(table.shape, generator=torch.Generator().manual_seed(3))
    module.references.tables = {"train": table}
    ours, _ = module.loss(batch, len(batch))
    ours.backward()
    gradient = flat_gradients(module.policy)
    module.zero_grad()

    ids = torch.cat([batch.chosen_input_ids, batch.rejected_input_ids])
    mask = torch.cat([batch.chosen_attention_mask, batch.rejected_attention_mask])
    answer = torch.cat([batch.chosen_length, batch.rejected_length]).unsqueeze(-1)
    completion = mask & (torch.arange(ids.shape[1]) >= mask.sum(-1, keepdim=True) - answer)

    def model(**_: Any) -> Any:
        logits = module.policy.model(input_ids=ids, attention_mask=mask.long()).logits
        logprobs = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        counted = torch.where(completion[:, 1:], logprobs, 0)
        unused = torch.zeros_like(counted)
        return SimpleNamespace(
            log_probs=counted, entropy=unused, mean_logits=unused, is_top1=unused.bool()
        )

    options = {"loss_types": ["sigmoid"], "loss_weights": [1.0], "f_divergence_type": "reverse_kl"}
    options |= {"label_smoothing": 0.0, "beta": 0.3, "ld_alpha": None}
    options |= {"precompute_ref_logps": True, "use_weighting": False}
    inputs = {
        "input_ids": ids,
        "attention_mask": mask.long(),
        "completion_mask": completion.long(),
        "ref_chosen_logps": table[:, 0],
        "ref_rejected_logps": table[:, 1],
    }
    theirs = DPOTrainer._compute_loss(trl_self(**options), model, inputs, return_outputs=False)
    theirs.backward()
    torch.testing.assert_close(ours, theirs, **SAME)
    torch.testing.assert_close(gradient, flat_gradients(module.policy), **SAME)
    assert gradient.norm() > 0.1
