"""Benchmarks: one command a figure, each against its peer in processes of their own."""
