"""State that survives a restart: flat JSON documents by kind and key, and what is carried over to the next server."""

from darts_server.store.store import Store

__all__ = ["Store"]
