"""Hidden states of running candidates: `steps` and `capture` in vLLM's workers, `receiver` in the API process."""
