"""vLLM's HTTP server in the API process: engine port, weight updates, adapters, shutdown.

`server` and `launch` start it. All of vLLM's routes call `llm`.
"""
