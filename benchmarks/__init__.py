"""Benchmarks. Each script prints a table at its end; no test depends on a time."""
