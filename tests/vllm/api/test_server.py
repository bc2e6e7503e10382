import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
from vllm.platforms import current_platform

from darts_server.exceptions import InvalidSetting
from darts_server.offline.demo.server import FLAGS, MODEL
from darts_server.vllm import flags
from darts_server.vllm.api.launch import start_engine
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


@pytest.mark.skipif(not current_platform.is_cpu(), reason="tests the CPU build")
@pytest.mark.parametrize("flags", [["--speculative-config", '{"method": "ngram"}'], ["--spec-method", "ngram"]])
def test_speculation_is_refused_on_a_cpu(flags: list[str]) -> None:
    with pytest.raises(InvalidSetting, match="samples from another distribution"):
        parse(["some/model", *flags])


@pytest.mark.skipif(not current_platform.is_cpu(), reason="tests the CPU build")
@pytest.mark.anyio
async def test_speculation_of_the_models_config_is_refused_on_a_cpu_before_the_engine_starts() -> None:
    args = parse([str(MODEL), *FLAGS])
    # vLLM reads it from the config of some models.
    args.speculative_config = {"method": "ngram", "num_speculative_tokens": 2}
    with pytest.raises(InvalidSetting, match="samples from another distribution"):
        async with start_engine(args):
            pass


def test_speculation_is_not_refused_on_other_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flags, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    flags.refuse_speculation({"method": "ngram"})
