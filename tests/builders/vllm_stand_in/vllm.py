"""As much of vLLM's interface as our engine calls, around a Llama in numpy: it starts at once.

Real weights give real log-probabilities in a real process. Variables of the process say what goes
wrong: STAND_IN_VERSION, STAND_IN_START_SECONDS, STAND_IN_STALE (weights are not taken),
STAND_IN_SWAPS (the answers come in another order), STAND_IN_CALLS (a file that gets a line a call),
and STAND_IN_GATE (a file that a generation of more than four rows waits for, and removes).
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from safetensors.numpy import load_file

__version__ = os.environ.get("STAND_IN_VERSION", "0.32.0")
SamplingParams = TokensPrompt = SimpleNamespace


class LLM:
    def __init__(self, *, model, enable_sleep_mode=False, **_):
        time.sleep(float(os.environ.get("STAND_IN_START_SECONDS", "0")))
        self.config = json.loads(Path(model, "config.json").read_text())
        self.weights = read(model)
        self._called(f"start {enable_sleep_mode}")

    def _called(self, text):
        if "STAND_IN_CALLS" in os.environ:
            with Path(os.environ["STAND_IN_CALLS"]).open("a") as file:
                file.write(f"{text}\n")

    def collective_rpc(self, method, kwargs):
        assert method == "reload_weights"
        self._called("load")
        if "STAND_IN_STALE" in os.environ:
            return
        self.weights = read(kwargs["weights_path"])

    def reset_prefix_cache(self):
        return True

    def sleep(self, level):
        self._called(f"sleep {level}")

    def wake_up(self, tags):
        self._called(f"wake {','.join(tags)}")

    def generate(self, prompts, settings, use_tqdm):
        self._called(f"generate {len(prompts)}")
        gate = os.environ.get("STAND_IN_GATE")
        while gate and len(prompts) > 4 and not Path(gate).exists():
            time.sleep(0.01)
        if gate and len(prompts) > 4:
            Path(gate).unlink()
        pairs = zip(prompts, settings, strict=True)
        outputs = [
            SimpleNamespace(prompt_token_ids=pair[0].prompt_token_ids, outputs=[written])
            for pair, written in ((pair, self._written(*pair)) for pair in pairs)
        ]
        return outputs[::-1] if "STAND_IN_SWAPS" in os.environ else outputs

    def _written(self, prompt, settings):
        drawn = np.random.default_rng(settings.seed)
        ids, entries = list(prompt.prompt_token_ids), []
        while len(entries) < settings.max_tokens:
            logits = last_logits(self.weights, self.config, ids) / (settings.temperature or 1.0)
            logprobs = logits - np.logaddexp.reduce(logits)
            probabilities = np.exp(logprobs)
            token = int(drawn.choice(len(logits), p=probabilities / probabilities.sum()))
            token = token if settings.temperature else int(logits.argmax())
            entries.append({token: SimpleNamespace(logprob=float(logprobs[token]))})
            ids.append(token)
            if token in settings.stop_token_ids:
                break
        return SimpleNamespace(token_ids=ids[len(prompt.prompt_token_ids) :], logprobs=entries)


def read(folder):
    files = sorted(Path(folder).glob("*.safetensors"))
    return {k: v.astype(np.float64) for file in files for k, v in load_file(file).items()}


def last_logits(weights, config, ids):
    width = config["head_dim"]
    groups = config["num_attention_heads"] // config["num_key_value_heads"]
    theta = config["rope_parameters"]["rope_theta"]
    angles = np.outer(np.arange(len(ids)), theta ** (-np.arange(0, width, 2) / width))
    cos, sin = (np.tile(f(angles), 2)[:, None] for f in (np.cos, np.sin))
    later = np.triu(np.ones((len(ids), len(ids)), dtype=bool), 1)

    def norm(x, name):
        scale = np.sqrt((x**2).mean(-1, keepdims=True) + config["rms_norm_eps"])
        return x / scale * weights[f"{name}.weight"]

    def turned(x):
        first, second = np.split(x, 2, axis=-1)
        return x * cos + np.concatenate([-second, first], -1) * sin

    x = weights["model.embed_tokens.weight"][ids]
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}"

        def product(x, name, layer=layer):
            return x @ weights[f"{layer}.{name}_proj.weight"].T

        h = norm(x, f"{layer}.input_layernorm")
        q, k, v = (
            product(h, f"self_attn.{name}").reshape(len(ids), -1, width) for name in ("q", "k", "v")
        )
        q, k, v = turned(q), np.repeat(turned(k), groups, 1), np.repeat(v, groups, 1)
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(width)
        scores[:, later] = -np.inf
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = np.einsum("hqk,khd->qhd", shares / shares.sum(-1, keepdims=True), v)
        x = x + product(mixed.reshape(len(ids), -1), "self_attn.o")
        h = norm(x, f"{layer}.post_attention_layernorm")
        gate = product(h, "mlp.gate")
        x = x + product(gate / (1 + np.exp(-gate)) * product(h, "mlp.up"), "mlp.down")
    return weights["lm_head.weight"] @ norm(x, "model.norm")[-1]
