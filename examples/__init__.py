"""Worked examples that run on two cores."""
