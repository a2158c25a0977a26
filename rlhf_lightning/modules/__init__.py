"""Thin LightningModules: SFT, reward model, PPO."""
