from tests.rollout.joining.conftest import anyio_backend

__all__ = ["anyio_backend"]
