"""What is measured: each module is one process, started by the benchmarks alternately."""
