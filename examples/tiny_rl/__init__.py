"""Running-digit arithmetic: a real policy, trained in minutes on a CPU."""
