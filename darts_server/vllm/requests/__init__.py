"""Runs in the API process: what a request of vLLM's is made of, from its prompt and its sampling to its outputs.

Nothing here knows groups, routes, or how many engines there are.
"""
