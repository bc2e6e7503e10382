"""The parts of the benchmark. Each fills one table row by row, so that rows before a failure are kept."""
