"""The weights of all models of a run."""

from __future__ import annotations

from rlhf_lightning.memory.run import Run
from rlhf_lightning.memory.weights import FROZEN, TRAINED
from rlhf_lightning.memory.workbench import (
    BASE,
    POLICY,
    REFERENCE,
    REWARD,
    VALUE,
    Workbench,
)


def trained_kinds(run: Run) -> tuple[str, ...]:
    """Return the models that the stage trains."""
    return {"sft": (POLICY,), "reward": (VALUE,), "ppo": (POLICY, VALUE)}[run.stage]


def model_bytes(bench: Workbench) -> dict[str, int]:
    """Return what the weights of each model take on one device, by the model's name."""
    run, found = bench.run, {}
    names = {POLICY: "policy", VALUE: "value model" if run.stage == "ppo" else "reward model"}
    if run.style.lora is not None:
        found["frozen base"] = bench.weights(POLICY, part=BASE)[FROZEN]
        names = {kind: f"{name}'s adapter" for kind, name in names.items()}
    for kind in trained_kinds(run):
        found[names[kind]] = bench.weights(kind)[TRAINED]
    if run.stage == "ppo" and run.style.lora is None:
        found["reference"] = bench.weights(REFERENCE)[FROZEN]
    if run.scoring.kind == "model":
        found["reward model"] = bench.weights(REWARD)[FROZEN]
    elif run.scoring.kind == "adapter":
        found["reward model's adapter"] = bench.weights(VALUE)[TRAINED]
    return {name: -(-size // run.sharded) for name, size in found.items()}


def trained_bytes(bench: Workbench) -> int:
    """Return the bytes of all trained weights, not sharded: those of a full set of gradients."""
    return sum(bench.weights(kind)[TRAINED] for kind in trained_kinds(bench.run))
