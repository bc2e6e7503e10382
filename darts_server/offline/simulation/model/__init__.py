"""The model of one rollout on engines: its batch, how fast engines decode, and what the rules make of it."""
