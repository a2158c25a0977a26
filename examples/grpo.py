"""GRPO with a function as reward: python examples/grpo.py POLICY PROMPTS.jsonl FOLDER."""

import argparse

import lightning as L

import rlhf_lightning as rlhf


def reward(prompts: list[str], completions: list[str], **columns: list) -> list[float]:
    """Return the share of different words: a response should not repeat itself."""
    words = [text.split() for text in completions]
    return [len(set(each)) / max(len(each), 1) for each in words]


def main() -> None:
    """Sample eight responses to each prompt and compare them with each other; no value model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("policy", help="folder or hub name")
    parser.add_argument("prompts", help="file with the column prompt")
    parser.add_argument("folder", help="of the run")
    parser.add_argument("--iterations", type=int, default=100)
    options = parser.parse_args()

    grpo, sampling = rlhf.GRPOHparams(kl_coef=0.05), rlhf.SamplingHparams(max_new_tokens=32)
    module = rlhf.PolicyGradientModule.from_pretrained(
        options.policy, reward, grpo=grpo, sampling=sampling
    )
    data = rlhf.PromptDataModule(options.prompts, module.tokenizer, batch_size=4, num_generations=8)
    arguments = rlhf.trainer_arguments(options.folder, max_iterations=options.iterations)
    trainer = L.Trainer(**arguments)
    trainer.fit(module, data)


if __name__ == "__main__":
    main()
