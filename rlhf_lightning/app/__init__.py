"""The application: Hydra configuration, stages and commands around the library."""
