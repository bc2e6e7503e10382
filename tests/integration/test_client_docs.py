"""The snippets of the client's pages, run in their order against the server."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from darts_client import Client
from darts_server.demo.server import MODEL, Server

pytestmark = pytest.mark.engine
ROOT = Path(__file__).parents[2]


@pytest.fixture
def trained(server: Server) -> Iterator[Server]:
    """A server whose weights may be replaced; the others' tests need the committed ones."""
    yield server
    with Client(server.url) as client:
        client.weights.push(MODEL / "model.safetensors")


@pytest.mark.parametrize("page", ["docs/client.md", "clients/README.md"])
def test_every_snippet_runs(
    trained: Server,
    page: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    (tmp_path / "darts_server").symlink_to(ROOT / "darts_server")  # the snippets read and write where they are run
    monkeypatch.chdir(tmp_path)
    snippets = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert snippets
    names: dict[str, object] = {}
    for snippet in snippets:
        exec(snippet.replace("http://localhost:8000", trained.url), names)
    assert capsys.readouterr().out
