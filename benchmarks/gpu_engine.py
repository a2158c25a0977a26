"""Decode and update of one model on one GPU, in one process: milliseconds, kernels, memory.

python -m benchmarks.gpu_engine --shape 0.5b --device cuda

Each measurement is written when it is done; a command that was cut short continues behind the last.
"""

from __future__ import annotations

import benchmarks.as_trained  # noqa: F401  (before torch loads)

# isort: split

import gc
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from benchmarks.command import Setting, finish, gib, parser, table
from benchmarks.configured import training_settings
from benchmarks.flops import head_weights, trunk_weights
from benchmarks.shapes import EOS, PAD
from benchmarks.worker import Stopwatch
from benchmarks.workers.generation import prompt_batch
from rlhf_lightning.models.compute_copies import compute_copies
from rlhf_lightning.models.gpu_kernels import fused_parts, gpu_kernels, kernels_of, use_gpu_kernels
from rlhf_lightning.models.heads import PolicyModel
from rlhf_lightning.models.memory import ADAM, COPY, activation_bytes, update_bytes
from rlhf_lightning.models.precision import MIXED_BF16, in_precision, set_matmul_precision
from rlhf_lightning.rollout.generators.base import CachedGenerator
from rlhf_lightning.rollout.noise import RowNoise

WARM_UP = 2  # tokens
DECODE = {  # engine -> new tokens
    "cuda": {"default": 512, "eager": 64, "generate": 128},
    "quick": {"default": 6, "eager": 6, "generate": 6},
}
ENGINES = {
    "default": "`rollout` as it is by default, fp32 weights under autocast",
    "eager": "`rollout=cached`, fp32 weights under autocast",
    "generate": "`generate`, a bf16 copy of the weights",
}
PROMPTS = {  # the warm-up has other lengths than what is measured
    "cuda": {"rows": 64, "warm": [16, 256], "prompt": [16, 241]},
    "quick": {"rows": 4, "warm": [2, 6], "prompt": [2, 5]},
}
MICRO_BATCH = {"cuda": ((8, 32), 768, 512), "quick": ((2,), 16, 8)}  # rows, tokens, asked positions
WAYS = {"plain": "transformers' layers under autocast", "default": "as a run does it"}
PEAK = {"A100": 312e12, "H100": 989e12, "H200": 989e12}  # bf16 operations a second, dense
NAMED = 12  # kernels


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measure what is not in the JSON yet, write it, print the tables."""
    made = parser(__doc__.splitlines()[0], repeats=3, shape="0.5b")
    made.add_argument("--parts", nargs="+", choices=["decode", "update"], help="default both")
    setting = Setting("gpu_engine", made.parse_args(arguments))
    set_matmul_precision("high")
    torch.set_num_threads(setting.options.threads)
    engine = Engine(setting)
    ways = {way: [f"update {way} {rows}" for rows in engine.micro_batch[0]] for way in WAYS}
    # Layers that are fused once stay so.
    names = ["decode eager", "decode generate", *ways["plain"], "decode default", *ways["default"]]
    found = engine.measured(
        [name for name in names if name.split()[0] in (setting.options.parts or name)]
    )
    return finish(setting, {}, {"parts": found}, render, settings=engine.settings)


class Engine:
    """One copy of a model's weights, and what is measured of it.

    Args:
        setting: of the command.
    """

    def __init__(self, setting: Setting) -> None:
        size = "quick" if setting.options.quick else "cuda"
        self.setting, self.device = setting, setting.device
        self.decoded, self.prompts = DECODE[size], PROMPTS[size]
        self.micro_batch = MICRO_BATCH[size]
        self.settings = {"prompts": self.prompts, "micro_batch": self.micro_batch}
        torch.manual_seed(0)
        with torch.device(self.device):
            config = AutoConfig.for_model(**setting.shape)
            self.model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)

    def measured(self, names: list[str]) -> dict[str, Any]:
        """Return the measurements by name, in order; each is on disk once it is there."""
        partial_file = self.setting.out.with_suffix(".partial")
        partial_file.parent.mkdir(parents=True, exist_ok=True)
        found = json.loads(partial_file.read_text()) if partial_file.exists() else {}
        for name in names:
            if name in found:
                continue
            kind, what, *rows = name.split()
            measure = self.decode if kind == "decode" else self.update
            found[name] = measure(what, *map(int, rows))
            partial_file.write_text(json.dumps(found), encoding="utf-8")
            sys.stdout.write(f"{name}: {json.dumps(found[name])[:300]}\n")
            sys.stdout.flush()
            gc.collect()
        partial_file.unlink(missing_ok=True)
        return {name: found[name] for name in names}

    # -- decode ---------------------------------------------------------------------------------

    def decode(self, name: str) -> dict[str, Any]:
        """Return milliseconds a token at lengths not seen before and again, kernels and memory."""
        tokens, generate = self.decoded[name], self._generators()[name]()
        warm, new = (self._prompts(self.prompts[kind]) for kind in ("warm", "prompt"))
        self._reset_peak()
        generate(warm, WARM_UP)
        first = self._seconds(partial(generate, new, tokens))
        again = [
            self._seconds(partial(generate, new, tokens))
            for _ in range(self.setting.options.repeats if name == "default" else 1)
        ]
        found = {
            "tokens": tokens,
            "first": first / tokens,
            "again": statistics.median(again) / tokens,
            "peak": self._peak(),
        }
        few, more = (self._kernels(partial(generate, new, count)) for count in (2, 10))
        if few and more:
            found["kernels"] = (sum(n for _, n, _ in more) - sum(n for _, n, _ in few)) / 8
            found["longest"] = more[:NAMED]
        return found

    def _generators(self) -> dict[str, Callable[[], Callable[..., Any]]]:
        def ours(make: Callable[..., Any]) -> Callable[..., Any]:
            generator, policy = make((), PAD), PolicyModel(self.model)  # nothing stops

            def generate(prompts: Any, tokens: int) -> None:
                with self._autocast(), policy.generating() as model:
                    generator(
                        model,
                        prompts,
                        noise=RowNoise(1),
                        temperature=1.0,
                        max_new_tokens=tokens,
                    )

            return generate

        def default() -> Callable[..., Any]:
            use_gpu_kernels(self.model)  # as once a run has placed it
            return ours(training_settings("ppo").rollout.build())

        return {
            "default": default,
            "eager": lambda: ours(CachedGenerator),
            "generate": self._transformers,
        }

    def _transformers(self) -> Callable[..., Any]:
        with torch.device(self.device):
            model: Any = AutoModelForCausalLM.from_config(self.model.config, dtype=torch.bfloat16)
        model.load_state_dict(self.model.state_dict())
        model.eval().generation_config = GenerationConfig(pad_token_id=EOS, eos_token_id=None)

        @torch.no_grad()
        def generate(prompts: Any, tokens: int) -> None:
            torch.backends.cuda.enable_cudnn_sdp(True)  # as it is where this project is not
            model.generate(
                input_ids=prompts.input_ids,
                attention_mask=prompts.attention_mask.long(),
                do_sample=True,
                top_k=0,
                top_p=1.0,
                max_new_tokens=tokens,
            )
            torch.backends.cuda.enable_cudnn_sdp(False)

        return generate

    def _prompts(self, lengths: list[int]) -> Any:
        task = {
            "prompt": lengths,
            "rows": self.prompts["rows"],
            "vocabulary": self.setting.shape["vocab_size"],
        }
        return prompt_batch(task, self.device)

    # -- update ---------------------------------------------------------------------------------

    def update(self, way: str, rows: int) -> dict[str, Any]:
        """Return milliseconds of a micro-batch forward and backward, its MFU, kernels, memory."""
        _, width, asked = self.micro_batch
        policy = PolicyModel(self.model.train())
        vocabulary = self.setting.shape["vocab_size"]
        ids = torch.randint(3, vocabulary, (rows, width), device=self.device)
        first = torch.arange(rows, device=self.device).unsqueeze(-1) * width
        positions = first + torch.arange(width - asked - 1, width - 1, device=self.device)
        tokens = ids[:, width - asked :].flatten()

        def step() -> None:
            found = policy(ids, positions.flatten(), tokens, 1.0, False)
            found.logprobs.sum().backward()

        with self._way(way, policy):
            step()
            step()
            self._reset_peak()
            laps = [self._seconds(step) for _ in range(self.setting.options.repeats)]
            peak, kernels = self._peak(), self._kernels(step)
        self.model.zero_grad(set_to_none=True)
        seconds = statistics.median(laps)
        found: dict[str, Any] = {
            "seconds": seconds,
            "mfu": self._share(rows, seconds),
            "peak": peak,
            "planned": self._planned(policy, rows * width),
            "kernels_of": kernels_of([policy]) if way == "default" else "",
        }
        if kernels:
            found["kernels"] = sum(count for _, count, _ in kernels)
            found["busy"] = sum(busy for *_, busy in kernels)
            found["longest"] = kernels[:NAMED]
        return found

    @contextmanager
    def _way(self, way: str, policy: PolicyModel) -> Iterator[None]:
        """Compute as the Trainer does inside."""
        with ExitStack() as together:
            together.enter_context(gpu_kernels("auto" if way == "default" else "torch"))
            together.enter_context(self._autocast())
            if way == "default":
                use_gpu_kernels(policy)
                together.enter_context(compute_copies(policy))
            yield

    def _planned(self, policy: PolicyModel, tokens: int) -> int:
        """Return the peak by the formula of micro-batches; here nothing is stepped or decoded."""
        weights = sum(parameter.numel() for parameter in policy.parameters())
        each = activation_bytes(policy.model.config, "mixed", fused=fused_parts(policy))
        held = 4 * weights + update_bytes([policy], "mixed") - (ADAM + COPY) * weights
        return held + tokens * each

    def _share(self, rows: int, seconds: float) -> float | None:
        """Return the model's operations over the peak of the card; None where that is not known."""
        name = torch.cuda.get_device_name() if self.device == "cuda" else ""
        peak = next((rate for card, rate in PEAK.items() if card in name), None)
        if peak is None:
            return None
        _, width, asked = self.micro_batch
        shape = self.setting.shape
        attention = shape["num_hidden_layers"] * shape["hidden_size"] * width  # causal
        operations = rows * width * (trunk_weights(shape) + attention)
        return 6 * (operations + rows * asked * head_weights(shape)) / seconds / peak

    # -- of a device ----------------------------------------------------------------------------

    def _autocast(self) -> Any:
        return in_precision(MIXED_BF16, torch.device(self.device))

    def _seconds(self, run: Callable[[], Any]) -> float:
        watch = Stopwatch(self.device)
        started = watch.now()
        run()
        return watch.now() - started

    def _peak(self) -> int:
        return torch.cuda.max_memory_allocated() if self.device == "cuda" else 0

    def _reset_peak(self) -> None:
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def _kernels(self, run: Callable[[], Any]) -> list[tuple[str, int, float]]:
        """Return name, launches and seconds of each kernel, the longest first; none on a CPU."""
        if self.device != "cuda":
            return []
        activities = torch.profiler.ProfilerActivity
        with torch.profiler.profile(activities=[activities.CPU, activities.CUDA]) as profiler:
            self._seconds(run)
        found: dict[str, list[float]] = {}
        for event in profiler.events():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                counted = found.setdefault(event.name[:80], [0, 0.0])
                counted[0] += 1
                counted[1] += event.device_time / 1e6
        rows = [(name, int(count), seconds) for name, (count, seconds) in found.items()]
        return sorted(rows, key=lambda row: -row[2])


def render(result: dict[str, Any]) -> str:
    """Return the result as Markdown."""
    parts = result["summary"]["parts"]
    rows = result["settings"]["prompts"]["rows"]
    decoded = [
        [
            ENGINES[name.split()[1]],
            *(f"{1e3 * part[key]:.2f}" for key in ("first", "again")),
            f"{rows / part['again']:,.0f}",
            _count(part),
            gib(part["peak"]),
        ]
        for name, part in parts.items()
        if name.startswith("decode")
    ]
    updated = [
        [
            f"{name.split()[2]} rows, {WAYS[name.split()[1]]}",
            f"{1e3 * part['seconds']:.1f}",
            "-" if part["mfu"] is None else f"{part['mfu']:.0%}",
            _count(part),
            gib(part["peak"]),
            gib(part["planned"]),
        ]
        for name, part in parts.items()
        if name.startswith("update")
    ]
    lines = []
    if decoded:
        head = [f"decode, {rows} rows", "ms a token, lengths not seen before", "ms a token, again"]
        lines += [table([*head, "tokens/s", "kernels a token", "peak"], decoded), ""]
    if updated:
        _, width, asked = result["settings"]["micro_batch"]
        head = [f"update, a micro-batch [rows, {width}], {asked} asked positions", "ms", "MFU"]
        lines += [table([*head, "kernels", "peak", "by the formula"], updated), ""]
    return "\n".join([*lines, *_longest(parts)]).rstrip()


def _count(part: dict[str, Any]) -> str:
    return f"{part['kernels']:,.0f}" if "kernels" in part else "-"


def _longest(parts: dict[str, Any]) -> list[str]:
    """Return the kernels that take the time of the last of each kind of part."""
    lines = []
    for name, part in parts.items():
        if "longest" in part and name.split()[1] == "default":
            told = (
                f"`{kernel[:40]}` {count} x, {1e3 * s:.1f} ms"
                for kernel, count, s in part["longest"]
            )
            lines.append(f"* {name}, longest kernels: {'; '.join(told)}")
    return lines


if __name__ == "__main__":
    main(sys.argv[1:])
