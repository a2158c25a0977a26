"""Records, sources, encoding and LightningDataModules."""
