"""The benchmark for one GPU: ``benchmarks/gpu/run``."""
