"""A worker extension of a user."""

from typing import Any


class UserExtension:
    """Mixed into vLLM's worker."""

    def user_method(self) -> str:
        return "here"

    def fail_next_load(self, rank: int) -> None:
        """Let the next load of weights fail half-way if this is a worker of that data-parallel engine."""
        worker: Any = self
        if worker.vllm_config.parallel_config.data_parallel_index != rank:
            return
        load = worker.reload_weights

        def load_half(weights_iterator: Any) -> None:
            def half() -> Any:
                for _, tensor in zip(range(9), weights_iterator, strict=False):
                    yield tensor
                raise OSError(f"injected on rank {rank}")

            del worker.reload_weights
            load(weights_iterator=half())

        worker.reload_weights = load_half
