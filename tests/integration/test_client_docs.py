"""Run the snippets of the client's pages in their order against the server."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from darts_client import Client
from darts_server.offline.demo.server import MODEL, Server

pytestmark = pytest.mark.engine
ROOT = Path(__file__).parents[2]


@pytest.fixture
def trainable(server: Server) -> Iterator[Server]:
    """The shared server; its original weights are pushed back afterwards, because other tests need them."""
    yield server
    with Client(server.url) as client:
        client.weights.push(MODEL / "model.safetensors")


@pytest.mark.nightly
@pytest.mark.parametrize("page", ["docs/client.md", "clients/README.md"])
def test_every_snippet_runs(
    trainable: Server,
    page: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    (tmp_path / "darts_server").symlink_to(ROOT / "darts_server")  # the snippets use relative paths
    monkeypatch.chdir(tmp_path)
    snippets = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert snippets
    names: dict[str, object] = {}
    for snippet in snippets:
        exec(snippet.replace("http://localhost:8000", trainable.url), names)
    assert capsys.readouterr().out
