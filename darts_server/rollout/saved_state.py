"""Check whether documents of a saved state can be used, before they replace what was learned here."""

from collections.abc import Callable, Mapping

from darts_server.rollout.allocation import allocator, auto, deadlines
from darts_server.rollout.learned import latency, prompts, rewards, statistics
from darts_server.rollout.learned.documents import Document, blob_parsers, parse_document, parse_value
from darts_server.rollout.pruning.pruner import BLOB_KIND
from darts_server.rollout.voting import BLOB_KIND as VOTE_BLOB_KIND

VALUES = allocator.PARSERS | auto.PARSERS | deadlines.PARSERS | statistics.PARSERS | latency.PARSERS | rewards.PARSERS
PARSERS: Mapping[str, Callable[[Document], object]] = {
    prompts.KIND: prompts.parse_stats,
    **{kind: parse_value(parse) for kind, parse in VALUES.items()},
    **blob_parsers(BLOB_KIND),
    **blob_parsers(VOTE_BLOB_KIND),
}
"""How documents are parsed, by kind. Documents of other kinds are used by nothing."""


def check_document(kind: str, document: Document) -> None:
    """
    Raises:
        ValueError: the document cannot be used; the message names the field.
    """
    if (parse := PARSERS.get(kind)) is not None:
        parse_document(document, parse)
