"""Model of one rollout: its batch, the speed of its engines, and which candidates the rules stop and return."""
