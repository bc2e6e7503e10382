"""What a single GPU says of our claim of speed: ``benchmarks/gpu/run``."""
