"""Integrations with trainers, each a module and an extra of its own."""
