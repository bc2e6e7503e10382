import socket
from pathlib import Path

import pytest

from darts_server.exceptions import InvalidSetting
from darts_server.vllm.api.server import url_of
from darts_server.vllm.flags import parse


def test_the_first_served_model_name_is_shaped() -> None:
    assert parse(["some/model", "--served-model-name", "a", "b"]).served_model_name == ["a", "b", "a:raw", "b:raw"]


def test_several_api_processes_are_refused() -> None:
    with pytest.raises(InvalidSetting, match="--api-server-count = 2"):
        parse(["some/model", "--api-server-count", "2"])


def test_the_address_of_a_server_is_where_it_listens(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        assert url_of(parse(["some/model"]), listening) == f"http://127.0.0.1:{port}"
        assert url_of(parse(["some/model", "--ssl-certfile", "c.pem"]), listening) == f"https://127.0.0.1:{port}"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "s"))
        assert url_of(parse(["some/model", "--uds", str(tmp_path / "s")]), listening) == f"unix:{tmp_path / 's'}"
