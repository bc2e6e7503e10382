"""State that survives a restart: flat JSON documents by kind and key, and prompts that are carried over."""

from darts_server.store.numbered import NumberedFile
from darts_server.store.store import Store

__all__ = ["NumberedFile", "Store"]
