"""Check whether documents of a saved state can be used, before they replace what was learned here."""

from collections.abc import Mapping, Sequence
from typing import Any

from darts_server.rollout.allocation import allocator, auto, deadlines
from darts_server.rollout.learned import statistics
from darts_server.rollout.learned.documents import Document, Kind, blob_kinds
from darts_server.rollout.pruning.pruner import BLOB_KIND
from darts_server.rollout.voting import BLOB_KIND as VOTE_BLOB_KIND

_BLOBS = (*blob_kinds(BLOB_KIND), *blob_kinds(VOTE_BLOB_KIND))
_ALL: Sequence[Kind[Any]] = (allocator.PRICE, auto.STATE, *deadlines.KINDS, *statistics.KINDS, *_BLOBS)
KINDS: Mapping[str, Kind[Any]] = {kind.name: kind for kind in _ALL}
"""Documents of other kinds are used by nothing."""


def check_document(kind: str, document: Document) -> None:
    """
    Raises:
        ValueError: the document cannot be used; the message names the field.
    """
    if (found := KINDS.get(kind)) is not None:
        found.parse(document)
