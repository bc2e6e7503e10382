"""``darts-server demo``: a tiny model, its task, and a server. The demo uses HTTP, as a trainer does."""
