"""The hidden states of running candidates, sent from vLLM's workers to the API process.

In a worker, `steps` reads a step of either model runner, and `capture` takes states out of the steps and sends them.
In the API process, `receiver` passes them on.
"""
