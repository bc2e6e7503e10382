"""What is broken on purpose, to see what becomes of everything else."""
