"""Integrations with trainers. Each trainer has a module and an extra of its own."""
