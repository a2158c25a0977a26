"""Measured processes, one a module, started alternately by the benchmarks."""
