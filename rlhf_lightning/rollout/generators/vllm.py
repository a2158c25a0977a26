"""Generation by vLLM in the same process, with a check that it really has the policy's weights.

Not run: no GPU was at hand. The check is what makes a silent fault loud: an engine that keeps a
stale output head (tied to the embeddings, so it is not sent) samples from another policy, and
nothing else would show it but a slow, unexplained drift.

vLLM draws its own random numbers. They are seeded per row, so a row's tokens do not depend on the
batch beyond rounding, but they are not the tokens of the other engines.
"""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf_lightning.batches import Generation, PromptBatch
from rlhf_lightning.functional.logprobs import token_logprobs
from rlhf_lightning.rollout.generators.base import as_generation
from rlhf_lightning.rollout.noise import RowNoise

PROBES = 4  # prompts whose log-probabilities are compared after each transfer of weights


class VllmGenerator:
    """Continues prompts with vLLM; every call sends the weights first and checks them.

    Args:
        stop_ids: ids that end a response.
        pad_token_id: fills what follows a response.
        logprob_tolerance: mean difference, in nats a prompt token, between vLLM and the policy.
        engine: further arguments of `vllm.LLM`, such as `gpu_memory_utilization`.

    Raises:
        ImportError: if vLLM is not installed.
    """

    def __init__(
        self,
        stop_ids: Sequence[int],
        pad_token_id: int,
        *,
        logprob_tolerance: float = 0.05,
        engine: dict[str, Any] | None = None,
    ) -> None:
        # The weights are handed over as tensors, which needs vLLM's worker in this process.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        try:
            self.vllm: Any = importlib.import_module("vllm")
        except ImportError as error:
            raise ImportError(
                "rollout=vllm needs vLLM, which is not installed: "
                "pip install -e '.[vllm]' in the checkout, or use rollout=cached"
            ) from error
        self.stop_ids = tuple(stop_ids)
        self.pad_token_id = pad_token_id
        self.logprob_tolerance = logprob_tolerance
        self.options = {"gpu_memory_utilization": 0.3, "dtype": "bfloat16", **(engine or {})}
        self.engine: Any = None

    @torch.no_grad()
    def __call__(
        self,
        model: PreTrainedModel,
        prompts: PromptBatch,
        *,
        noise: RowNoise,
        temperature: float,
        max_new_tokens: int,
    ) -> Generation:
        """Return one response a prompt; see `Generator`."""
        pairs = zip(prompts.input_ids, prompts.attention_mask, strict=True)
        rows = [ids[mask].tolist() for ids, mask in pairs]
        self.send_weights(model)
        self.check_weights(model, rows[:PROBES])
        seeds = (noise.uniform(prompts.row_ids, 0) * 2**53).long().tolist()
        settings = [
            self.vllm.SamplingParams(
                temperature=temperature,
                top_p=1.0,
                top_k=0,
                min_p=0.0,
                seed=seed,
                max_tokens=max_new_tokens,
                stop_token_ids=list(self.stop_ids),
                ignore_eos=True,  # only our own stop ids end a response
                detokenize=False,
            )
            for seed in seeds
        ]
        outputs = self._generate(rows, settings)
        ids = [list(output.outputs[0].token_ids) for output in outputs]
        padded = [row + [self.pad_token_id] * (max_new_tokens - len(row)) for row in ids]
        responses = torch.tensor(padded, device=prompts.input_ids.device)
        return as_generation(prompts.input_ids, responses, self.stop_ids, self.pad_token_id)

    def send_weights(self, model: PreTrainedModel) -> None:
        """Copy every weight of `model`, a tied output head under its own name too.

        Raises:
            TypeError: if adapters are injected into `model`; vLLM knows no such weights.
        """
        if self.engine is None:
            self.engine = self._start(model)
        weights = [
            (name, parameter.detach())
            for name, parameter in model.named_parameters(remove_duplicate=False)
        ]
        if any(".base_layer." in name for name, _ in weights):
            raise TypeError("rollout=vllm takes no injected adapters: use rollout=cached")
        self.engine.apply_model(lambda engine_model: engine_model.load_weights(weights))
        self.engine.reset_prefix_cache()  # keys and values of the old weights

    def check_weights(self, model: PreTrainedModel, rows: Sequence[Sequence[int]]) -> None:
        """Compare both sides' log-probabilities of prompts.

        Raises:
            RuntimeError: if they differ by more than `logprob_tolerance` on average.
        """
        settings = self.vllm.SamplingParams(
            temperature=1.0, max_tokens=1, prompt_logprobs=0, detokenize=False
        )
        outputs = self._generate(rows, [settings] * len(rows))
        gaps: list[Tensor] = []
        for row, output in zip(rows, outputs, strict=True):
            ids = torch.tensor([row], device=model.device)
            ours = token_logprobs(model(input_ids=ids).logits[:, :-1], ids[:, 1:], temperature=1.0)
            later = zip(row[1:], output.prompt_logprobs[1:], strict=True)
            theirs = torch.tensor([entry[token].logprob for token, entry in later])
            gaps.append((ours[0].cpu() - theirs).abs())
        gap = float(torch.cat(gaps).mean()) if any(map(len, gaps)) else 0.0
        if not gap <= self.logprob_tolerance:
            raise RuntimeError(
                f"vLLM and the policy differ by {gap:.3f} nats a prompt token on average after a "
                f"transfer of weights (logprob_tolerance={self.logprob_tolerance}): some weight "
                "has not arrived; use rollout=cached"
            )

    def _generate(self, rows: Sequence[Sequence[int]], settings: list[Any]) -> list[Any]:
        inputs = [self.vllm.TokensPrompt(prompt_token_ids=list(row)) for row in rows]
        outputs: list[Any] = self.engine.generate(inputs, settings, use_tqdm=False)
        return outputs

    def _start(self, model: PreTrainedModel) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            model.config.save_pretrained(folder)
            return self.vllm.LLM(
                model=folder,
                skip_tokenizer_init=True,
                load_format="dummy",
                generation_config="vllm",  # never the checkpoint's top-k and top-p
                **self.options,
            )
