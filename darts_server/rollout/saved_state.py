"""Check whether documents of a saved state can be used, before they replace what was learned here."""

from collections.abc import Callable, Mapping

from darts_server.rollout.allocation import allocator, auto, deadlines
from darts_server.rollout.exchange import positions
from darts_server.rollout.learned import dataset, latency, prompts, rewards
from darts_server.rollout.learned.blobs import PART_SUFFIX, check_part, parse_manifest
from darts_server.rollout.learned.documents import Document, parse_document, parse_value
from darts_server.rollout.pruning.pruner import BLOB_KIND
from darts_server.rollout.voting.confidence import BLOB_KIND as VOTE_BLOB_KIND

BLOB_KINDS = (BLOB_KIND, VOTE_BLOB_KIND)
LEARNED = dataset.PARSERS | latency.PARSERS | rewards.PARSERS
VALUES = allocator.PARSERS | auto.PARSERS | deadlines.PARSERS | LEARNED | positions.PARSERS
PARSERS: Mapping[str, Callable[[Document], object]] = {
    prompts.KIND: prompts.parse_stats,
    **{kind: parse_value(parse) for kind, parse in VALUES.items()},
    **dict.fromkeys(BLOB_KINDS, parse_manifest),
    **{kind + PART_SUFFIX: check_part for kind in BLOB_KINDS},
}
"""How documents are parsed, by kind. Documents of other kinds are used by nothing."""


def check_document(kind: str, document: Document) -> None:
    """
    Raises:
        ValueError: the document cannot be used; the message names the field.
    """
    if (parse := PARSERS.get(kind)) is not None:
        parse_document(document, parse)
