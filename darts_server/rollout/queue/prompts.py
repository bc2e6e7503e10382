"""What prompts of the queue have in common, as bytes, for the disk."""

import hashlib

from darts_server.rollout.queue.entries import Terms


def encode_terms(terms: Terms, priority: int) -> bytes:
    """Encode what prompts that are put together have in common, for `digest_of`."""
    return f"[{terms.encoded}, {priority}]".encode()


def digest_of(document: bytes, terms: bytes) -> str:
    """Return a hash of a prompt and all that its group depends on."""
    return hashlib.sha256(document + b"\0" + terms).hexdigest()
