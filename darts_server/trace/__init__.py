"""``darts-server trace``: what a server has learned of lengths, as a trace for ``darts-server simulate``.

Uses the saved state and policies, and nothing that serves.
"""
