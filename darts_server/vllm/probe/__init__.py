"""The hidden states of running candidates, sent from vLLM's workers to the API process.

In a worker, `probed_requests` tracks the requests that have a probe, `steps` reads a step of either model runner,
`capture` takes states out of the steps, and `sender` sends them. In the API process, `receiver` passes them on. `wire`
is the format between them.
"""
