"""Rules that decide how groups are sampled: candidates, deadlines, prompts ahead, pruning, votes."""
