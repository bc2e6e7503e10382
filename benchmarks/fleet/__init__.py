"""What the coordinator of many engines costs. Run it as ``python -m benchmarks.fleet``."""
