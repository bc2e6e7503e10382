"""Choose the form of an answer by the request's `Accept` header (RFC 9110, 12.5.1)."""

import re
from collections.abc import Sequence

from starlette.datastructures import Headers

_RANGE = re.compile(r"\s*([^\s;,/]+/[^\s;,/]+)\s*((?:;[^,]*)?)$")
_WEIGHT = re.compile(r";\s*q\s*=\s*(0(?:\.\d{0,3})?|1(?:\.0{0,3})?)\s*(?:;|$)", re.IGNORECASE)


def choose_media_type(headers: Headers, offers: Sequence[str]) -> str | None:
    """Return the offer that the caller prefers, of equal ones the first; ``None`` if it accepts none of them.

    Without the header it accepts everything. Of the ranges that an offer is in, the narrowest counts.
    """
    lines = headers.getlist("accept")
    if not any(line.strip() for line in lines):
        return offers[0]
    weights: dict[str, float] = {}
    for part in ",".join(lines).split(","):
        if found := _RANGE.match(part):
            weight = _WEIGHT.search(found[2])
            weights[found[1].lower()] = float(weight[1]) if weight else 1.0
    best = max(offers, key=lambda offer: _weight(offer, weights))  # the first of the largest
    return best if _weight(best, weights) > 0 else None


def _weight(offer: str, weights: dict[str, float]) -> float:
    ranges = (offer, offer.split("/")[0] + "/*", "*/*")
    return next((weights[one] for one in ranges if one in weights), 0.0)
