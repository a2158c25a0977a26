"""Models of random weights, for runs that only show that they run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlhf_lightning.app.stages.spec import Stage
from rlhf_lightning.models.adapter_files import save_adapter
from rlhf_lightning.models.building import seeded_init
from rlhf_lightning.models.factory import head_std, load_base, load_policy
from rlhf_lightning.models.heads import ScalarHeadModel, scalar_head
from rlhf_lightning.models.lora import add_scalar_model
from rlhf_lightning.models.ppo_models import ADAPTER
from rlhf_lightning.models.quiet import quieten
from rlhf_lightning.modules.export import save_hf_model
from rlhf_lightning.runs.manifest import source_fingerprint, write_manifest
from rlhf_lightning.runs.publish import replacing_folder
from rlhf_lightning.text.tokenizers import (
    load_tokenizer,
    stop_ids,
    vocabulary_of,
    with_template,
)

_TINY = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 1 << 17,  # more than any policy reads
}


def write_untrained(stage: Stage, folder: Path, settings: Any) -> None:
    """Write a model folder of random weights, with a manifest.

    Args:
        stage: stage that makes such models: a policy has the tokenizer of `model`, a reward model
            that of the policy that it starts from.
        folder: a new folder.
        settings: settings of a command that has a model.
    """
    quieten()
    model = settings.model
    policy = None if stage.trains_policy else settings.artifacts.of(stage.starts_from)
    if policy is None:
        tokenizer = with_template(model.tokenizer.build(), model.chat_template)
    else:
        tokenizer = load_tokenizer(policy, **model.template, **model.origin)
    fields = (model.from_scratch or _TINY) | vocabulary_of(tokenizer)
    drawn: Any = load_policy(from_scratch=fields, seed=settings.seed)
    stops = stop_ids(tokenizer, policy, revision=model.revision)
    with replacing_folder(folder) as staging:
        if not stage.trains_policy:
            size = drawn.model.get_output_embeddings().in_features
            with seeded_init(settings.seed):
                head = scalar_head(size, init_std=head_std(size, "reward"))
            drawn = ScalarHeadModel(drawn.model.base_model, head)
        save_hf_model(drawn, tokenizer, staging, drawn.state_dict(), stop_ids=stops)
        if policy is not None and settings.select("lora") is not None:
            _save_adapter(policy, staging / ADAPTER, settings)
        write_manifest(staging, stage=stage.name, run="none")


def _save_adapter(policy: str, folder: Path, settings: Any) -> None:
    model = settings.model
    base = load_base(policy, settings.lora, **model.origin)
    std = head_std(base.hidden_size, "reward")
    adapted = add_scalar_model(base, "reward", init_std=std, seed=settings.seed)
    print_ = source_fingerprint(policy, model.revision)
    save_adapter(adapted, folder, adapted.state_dict(), base=policy, base_fingerprint=print_)
