"""All documents of a kind, as a saved state has them."""

import json
from typing import Any

from darts_server.store import Store
from darts_server.store.archive import LIMIT_BYTES, unpack


def saved_documents(store: Store, kind: str) -> dict[str, Any]:
    """Return documents by key, in the order of the saved state."""
    return {key: json.loads(text) for each, key, text in unpack(store.export(), LIMIT_BYTES) if each == kind}
