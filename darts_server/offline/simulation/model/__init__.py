"""Model of one rollout."""
