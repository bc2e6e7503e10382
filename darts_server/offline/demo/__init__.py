"""``darts-server demo``: the tiny model and its task, a server on it, a report. It talks HTTP, as a trainer does."""
