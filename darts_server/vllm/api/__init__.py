"""Runs in the API process: vLLM's HTTP server around the engine port, weight updates, adapters, and the shutdown.

`server` and `launch` are where it starts, `llm` is the client that all of vLLM's routes call.
"""
