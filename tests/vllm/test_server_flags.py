"""Flags of vLLM's that we refuse or explain."""

import pytest
from vllm.utils.argparse_utils import FlexibleArgumentParser

from darts_server.exceptions import InvalidSetting
from darts_server.vllm.compat.entrypoints import make_arg_parser
from darts_server.vllm.server import MORE_HELP, parse


def test_several_api_processes_are_refused_and_replicas_named() -> None:
    with pytest.raises(InvalidSetting, match="--replicas N"):
        parse(["some/model", "--api-server-count", "2"])


def test_the_help_of_vllms_flags_names_replicas(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        parse(["--help=data-parallel-size"])
    assert "--replicas N" in " ".join(capsys.readouterr().out.split())
    parser = make_arg_parser(FlexibleArgumentParser())
    names = {action.dest for action in parser._actions}
    assert MORE_HELP.keys() <= names
