"""One rank that builds sharded models: `start_stage.py equal|memory|failure OUT`.

`equal` compares every parameter, buffer and tie of several families with a process by itself,
`memory` says what this rank held at most, `failure` lets rank 0 alone find a damaged file.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlhf_lightning.distributed.collectives import SHARD, mesh_in_groups
from rlhf_lightning.hparams import LoraHparams
from rlhf_lightning.models.building import place_on_ranks
from rlhf_lightning.models.classifiers import load_classifier
from rlhf_lightning.models.export import export_scalar_model
from rlhf_lightning.models.factory import frozen, load_policy, load_scalar_model
from rlhf_lightning.models.ppo_models import PPOModels, ppo_models
from rlhf_lightning.modules.placement import sharing_models
from tests.builders.models import config_fields, tiny_policy, tiny_scalar_model

MIB = 2**20
Roots = dict[str, nn.Module]


def whole_tensors(root: nn.Module) -> dict[str, tuple[int, Tensor]]:
    """Return every tensor a module keeps, gathered, and which of them are one."""
    numbers: dict[int, int] = {}
    found = {}
    for path, module in root.named_modules():
        kept = {**module._parameters, **module._buffers, **vars(module)}
        for name, value in kept.items():
            if isinstance(value, Tensor):
                number = numbers.setdefault(id(value), len(numbers))
                full = value.full_tensor() if isinstance(value, DTensor) else value
                found[f"{path}.{name}"] = (number, full.detach())
    return found


def roots_of(models: PPOModels) -> Roots:
    if models.base is not None:
        return {"base": place_on_ranks(models.base)}
    return {"policy": models.policy, "value": models.value, "reference": models.reference}


def differences(build: Callable[[], Roots], module: Any) -> dict[str, Any]:
    alone = build()
    with sharing_models(module):
        shared = build()
    report: dict[str, Any] = {"wrong": [], "tensors": 0, "buffers": 0, "tied": 0, "sharded": 0}
    for name, root in shared.items():
        report["sharded"] += sum(isinstance(p, DTensor) for p in root.parameters())
        report["buffers"] += len(list(root.buffers()))
        want, got = whole_tensors(alone[name]), whole_tensors(root)
        report["wrong"] += [f"{name}{key} is in one only" for key in want.keys() ^ got.keys()]
        report["tensors"] += len(want)
        report["tied"] += len(want) - len({number for number, _ in want.values()})
        for key in want.keys() & got.keys():
            (tie, a), (other, b) = want[key], got[key]
            if (tie, a.dtype, a.device) != (other, b.dtype, b.device) or not torch.equal(a, b):
                report["wrong"].append(f"{name}{key}: {a.dtype} {b.dtype} ties {tie} {other}")
        modes = [m.training for m in alone[name].modules()]
        if modes != [m.training for m in root.modules()]:
            report["wrong"].append(f"{name}: train and eval differ")
        if [p.requires_grad for p in alone[name].parameters()] != [
            p.requires_grad for p in root.parameters()
        ]:
            report["wrong"].append(f"{name}: requires_grad differs")
    return report


def equal(out: Path, module: Any) -> dict[str, Any]:
    found = {}
    families = {t: config_fields(t) for t in ("gpt2", "opt", "llama", "gpt_neox")}
    families["llama_tied"] = config_fields("llama", tie_word_embeddings=True)
    families["gemma3_text"] = config_fields("llama", intermediate_size=64, head_dim=16) | {
        "model_type": "gemma3_text"
    }
    for family, fields in families.items():
        folder = out / family
        if dist.get_rank() == 0:
            load_policy(from_scratch=fields, seed=3).model.save_pretrained(folder)
        dist.barrier()
        build = partial(ppo_models, folder, None, value_head="zero", precision="bf16-mixed")
        lora = LoraHparams(r=4, alpha=8, base_precision="bf16-mixed")
        found[family] = differences(lambda build=build: roots_of(build()), module)
        found[f"{family}_lora"] = differences(
            lambda build=build, lora=lora: roots_of(build(lora=lora, seed=5)), module
        )
    reward = out / "reward"
    if dist.get_rank() == 0:
        scalar = tiny_scalar_model("llama", bias=0.75)
        export_scalar_model(scalar, reward, scalar.state_dict(), pad_token_id=0)
    dist.barrier()
    loads: dict[str, Callable[[], nn.Module]] = {
        "reward": lambda: load_scalar_model(reward, precision="bf16-mixed"),
        "new_head": lambda: load_scalar_model(out / "llama", head="reward", seed=4),
        "classifier": lambda: load_classifier(reward, dtype="auto"),
        "from_scratch": lambda: load_policy(from_scratch=config_fields("llama"), seed=7),
    }
    for name, load in loads.items():
        build = lambda load=load, name=name: {name: place_on_ranks(frozen(load()), frozen=True)}  # noqa: E731
        found[name] = differences(build, module)
    return found


def held(field: str) -> int:
    (line,) = (x for x in Path("/proc/self/status").read_text().splitlines() if field in x)
    return int(line.split()[1]) * 1024


def memory(out: Path, module: Any) -> dict[str, Any]:
    size = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 12}
    if dist.get_rank() == 0:
        tiny_policy("llama", **size, vocab_size=512).model.save_pretrained(out / "large")
    dist.barrier()
    with sharing_models(module):  # imports and buffers of the process group
        place_on_ranks(load_policy(from_scratch=config_fields("llama")))
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
    before = held("VmRSS")
    with sharing_models(module):
        models = ppo_models(out / "large", None, value_head="zero")
    whole = sum(p.numel() * 4 for p in models.policy.parameters())
    return {"peak": held("VmHWM") - before, "whole": whole, "before": before}


def failure(out: Path, module: Any) -> dict[str, Any]:
    if dist.get_rank() == 0:
        tiny_policy("llama").model.save_pretrained(out / "damaged")
        file = out / "damaged" / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-100])
    dist.barrier()
    try:
        with sharing_models(module):
            ppo_models(out / "damaged", None, value_head="zero")
    except (RuntimeError, ValueError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {}


if __name__ == "__main__":
    what, folder = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = mesh_in_groups("cpu", 2, 2)[SHARD]
    strategy = SimpleNamespace(mesh_of_shards=mesh, compute_dtype=None)
    trainer = SimpleNamespace(strategy=strategy)
    shared = SimpleNamespace(device_mesh=mesh, trainer=trainer, compute_dtype=None)
    do = {"equal": equal, "memory": memory, "failure": failure}[what]
    text = json.dumps(do(folder, shared))
    (folder / f"rank_{dist.get_rank()}.json").write_text(text)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)
