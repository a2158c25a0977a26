"""RLHF as plain LightningModules: supervised fine-tuning, reward modelling and PPO."""

__version__ = "0.1.0"
