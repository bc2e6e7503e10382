"""A request as data: sent, recorded, and printed as a curl command."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from faults.fuzz.values import Mutation

MAX_INLINE_BYTES = 500
"""A longer body, or one that is no text, is printed as a file."""


@dataclass(frozen=True)
class Upload:
    """A binary body by its name in `faults.fuzz.uploads`. ``mutations``: of a document in a saved state."""

    name: str
    mutations: tuple[Mutation, ...] = ()


@dataclass(frozen=True)
class Request:
    """A request.

    In path, body and header values ``$batch``, ``$group`` and ``$trajectory`` stand for the last such id that an
    earlier request of the example got, ``$run`` for a number of this execution, and ``$root`` for --weights-root.

    Attributes:
        route: its path as the API describes it, for statistics.
        path: percent-encoded, with the query.
        headers: values are Latin-1.
        after: seconds to wait before it is sent.
        background: whether the next request is sent without waiting for this one's answer.
        leaves_after: seconds until the caller disconnects.
    """

    method: str
    route: str
    path: str
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes | Upload = b""
    after: float = 0.0
    background: bool = False
    leaves_after: float | None = None

    @property
    def name(self) -> str:
        """Method and route, for statistics."""
        return f"{self.method} {self.route}"

    def curl(self, url: str, body: bytes, file: Path) -> str:
        """Return a command that sends it. ``file``: written with the body, if the command line cannot hold that."""
        command = ["curl", "-sS", "-X", self.method, f"{url}{self.path}"]
        if self.leaves_after is not None:
            command += ["-m", f"{self.leaves_after:g}"]
        for name, value in self.headers:
            command += ["-H", f"{name}: {value}" if value else f"{name};"]
        if body:
            text = body.decode(errors="replace")
            if len(body) <= MAX_INLINE_BYTES and text.isprintable() and text.encode() == body and text[0] != "@":
                command += ["--data-binary", text]
            else:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(body)
                command += ["--data-binary", f"@{file}"]
        wait = f"sleep {self.after:g}; " if self.after else ""
        return wait + shlex.join(command) + (" &" if self.background else "")


Example = tuple[Request, ...]
"""Requests that are sent in this order. The unit that is checked, shrunk and printed."""


def commands(example: Example, url: str, bodies: Sequence[bytes], folder: Path) -> list[str]:
    """Return curl commands that send the requests; long bodies are written to the folder."""
    sent = zip(example, bodies, strict=True)
    return [each.curl(url, body, folder / f"body-{number}") for number, (each, body) in enumerate(sent)]
