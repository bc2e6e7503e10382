"""Runs in the API process: makes vLLM's requests from prompts and sampling parameters, and answers from its outputs.

This room knows no groups, no routes, and no number of engines.
"""
