"""Tiny models, stages, runs and command lines that several folders of tests build."""
