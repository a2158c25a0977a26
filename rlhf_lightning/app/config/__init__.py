"""Compose, check and describe configurations: the only code that knows OmegaConf."""
