"""Trainers of others, each a module and an extra of its own."""
