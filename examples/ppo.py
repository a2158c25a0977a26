"""PPO against a reward model: python examples/ppo.py POLICY REWARD_MODEL PROMPTS.jsonl FOLDER."""

import argparse

import lightning as L

from rlhf_lightning import (
    PPOHparams,
    PPOModule,
    PromptDataModule,
    SamplingHparams,
    compare,
    trainer_arguments,
)


def main() -> None:
    """Train, then print how often the policy beats the one that it started from."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("policy", help="folder or hub name")
    parser.add_argument("reward", help="folder or hub name of a reward model")
    parser.add_argument("prompts", help="file with the column prompt")
    parser.add_argument("folder", help="of the run")
    parser.add_argument("--iterations", type=int, default=100)
    options = parser.parse_args()

    ppo, sampling = PPOHparams(kl_coef=0.05, num_minibatches=2), SamplingHparams(max_new_tokens=32)
    module = PPOModule.from_pretrained(options.policy, options.reward, ppo=ppo, sampling=sampling)
    data = PromptDataModule(options.prompts, module.tokenizer, batch_size=8)
    trainer = L.Trainer(**trainer_arguments(options.folder, max_iterations=options.iterations))
    trainer.fit(module, data)
    found = compare(module, options.policy, options.prompts, reward=options.reward)
    print(f"win rate {found.win_rate:.1%} ({found.low:.1%} to {found.high:.1%})")  # noqa: T201


if __name__ == "__main__":
    main()
