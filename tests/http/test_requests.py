"""The form of an answer is the one that its caller prefers."""

import pytest
from starlette.datastructures import Headers

from darts_server.http.requests import choose_media_type

JSON, TENSORS = "application/json", "application/vnd.safetensors"


@pytest.mark.parametrize(
    ("accept", "chosen"),
    [
        ("", JSON),
        ("*/*", JSON),
        ("application/*", JSON),
        ("APPLICATION/JSON", JSON),
        (TENSORS, TENSORS),
        (f"{JSON}, {TENSORS}", JSON),
        (f"{TENSORS}, {JSON}", JSON),
        (f"{TENSORS}, {JSON};q=0.9", TENSORS),
        (f"{TENSORS};q=0.5, */*;q=0.1", TENSORS),
        (f"{TENSORS} ; q = 0.5 , {JSON};charset=utf-8;q=0.6", JSON),
        (f"*/*, {JSON};q=0", TENSORS),
        (f"{TENSORS};q=0, text/html", None),
        ("application/*;q=0, */*", None),
        ("text/html, application/xhtml+xml;q=0.9", None),
        ("json", None),
    ],
)
def test_the_preferred_form_is_chosen(accept: str, chosen: str | None) -> None:
    assert choose_media_type(Headers({"accept": accept}), (JSON, TENSORS)) == chosen


def test_several_headers_are_one_list() -> None:
    raw = [(b"accept", b"text/html"), (b"accept", TENSORS.encode())]
    assert choose_media_type(Headers(raw=raw), (JSON, TENSORS)) == TENSORS
