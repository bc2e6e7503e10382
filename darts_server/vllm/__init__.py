"""Everything that touches vLLM, in one folder for each process that runs it.

* `engine_core`: vLLM's engine process and its workers.
* `requests`: the API process, for one request: its parameters, its tokens, its outputs.
* `api`: the API process, as a server: vLLM's app, the engine port, weights, LoRA adapters, the end of the process.
* `fleet`: several engines. `host` runs in a process beside each engine, and everything else in the API process.

`flags`, `checks` and `compat` are used by the API process and by hosts.
"""
