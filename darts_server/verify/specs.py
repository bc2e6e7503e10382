"""The grammar of ``--verifier``: ``[NAME=][WEIGHT*]SPEC``."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import httpx

from darts_server.estimates.answers import create_extractor
from darts_server.exceptions import InvalidRequest, InvalidSetting

FORMS = (
    "FILE.py:FUNCTION (or trl:FILE.py:FUNCTION, verl:FILE.py:FUNCTION), boxed, regex:PATTERN, math-verify, or "
    "openrlhf+URL, nemo-gym+URL, slime+URL"
)
HEAD = re.compile(r"(?:(?P<name>[A-Za-z][\w.-]*)=)?(?:(?P<weight>[-+]?\d*\.?\d+)\*)?(?P<spec>.+)", re.DOTALL)
FILE = re.compile(r"(?:(?P<kind>trl|verl):)?(?P<path>.+\.py):(?P<function>[A-Za-z_]\w*)")
URL = re.compile(r"(?:(?P<kind>openrlhf|nemo-gym|slime)\+)?(?P<url>https?://[^\s/]+\S*)")
PATHS = {"/verify": "nemo-gym", "/get_reward": "openrlhf"}
"""Ends of URLs that name a protocol: NeMo-Gym's only route, and the route in OpenRLHF's examples."""


class Kind(StrEnum):
    FUNCTION = "function"
    """A function of veRL's or TRL's form, recognised by its parameters."""
    TRL = "trl"
    VERL = "verl"
    BOXED = "boxed"
    REGEX = "regex"
    MATH_VERIFY = "math-verify"
    OPENRLHF = "openrlhf"
    NEMO_GYM = "nemo-gym"
    SLIME = "slime"


REMOTE = (Kind.OPENRLHF, Kind.NEMO_GYM, Kind.SLIME)


@dataclass(frozen=True, slots=True)
class Spec:
    """A verifier of the command line, whose setting is ``text``."""

    text: str
    name: str
    kind: Kind
    weight: float = 1.0
    target: str = ""
    """File, pattern or URL."""
    function: str = ""
    """Name of the file's function."""


def parse_specs(texts: Sequence[str]) -> tuple[Spec, ...]:
    """Parse the verifiers of the command line. No code is loaded.

    Raises:
        InvalidSetting
    """
    specs = tuple(map(_parse_spec, texts))
    names = Counter(spec.name for spec in specs)
    for spec in specs:
        if names[spec.name] > 1:
            raise InvalidSetting(
                f"--verifier {spec.text}: another verifier is named {spec.name} too; give each a name, as NAME=SPEC"
            )
    return specs


def _parse_spec(text: str) -> Spec:
    head = HEAD.fullmatch(text.strip())
    if head is None:
        raise InvalidSetting(f"--verifier: must not be empty; give {FORMS}")
    spec_text = head["spec"]
    weight = float(head["weight"] or 1)

    def create(kind: Kind, target: str = "", function: str = "") -> Spec:
        name = head["name"] or function or kind.value
        return Spec(text, name, kind, weight, target, function)

    if spec_text in (Kind.BOXED, Kind.MATH_VERIFY):
        return create(Kind(spec_text))
    if spec_text.startswith("regex:"):
        pattern = spec_text.removeprefix("regex:")
        # The worker compiles the pattern again. Here, only its errors are found.
        try:
            create_extractor(pattern)
        except InvalidRequest as error:
            raise InvalidSetting(f"--verifier {text}: the pattern {error.message}") from error
        return create(Kind.REGEX, pattern)

    url = URL.fullmatch(spec_text)
    if url is not None:
        kinds_by_path = (kind for path, kind in PATHS.items() if url["url"].endswith(path))
        kind = url["kind"] or next(kinds_by_path, None)
        if kind is None:
            raise InvalidSetting(
                f"--verifier {text}: the URL does not show what its server expects; write openrlhf+{url['url']}, "
                f"nemo-gym+{url['url']} or slime+{url['url']}"
            )
        try:
            httpx.URL(url["url"])
        except httpx.InvalidURL as error:
            raise InvalidSetting(f"--verifier {text}: is not a valid URL ({error})") from error
        return create(Kind(kind), url["url"])

    file = FILE.fullmatch(spec_text)
    if file is None:
        raise InvalidSetting(f"--verifier {text}: {spec_text!r} is no verifier; give {FORMS}")
    if not Path(file["path"]).is_file():
        raise InvalidSetting(f"--verifier {text}: {file['path']} is not a file; give the path of an existing file")
    return create(Kind(file["kind"] or "function"), str(Path(file["path"]).absolute()), file["function"])
