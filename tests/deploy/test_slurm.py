"""The Slurm script, with stand-ins for Slurm's commands on this machine."""

import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.deploy.names import DEPLOY

SCRIPT = DEPLOY / "slurm" / "rollouts.sbatch"
NODES = ("trainer", "localhost", "127.0.0.2")
"""The last two are names of this machine."""

# srun runs its command here, and passes signals on, as the real one does.
SRUN = """\
#!/usr/bin/env bash
while [ "${1#--}" != "$1" ]; do case $1 in --output) log=$2 ;; --nodelist) export NODE=$2 ;; esac; shift 2; done
exec "$@" >"${log:-/dev/stdout}" 2>&1
"""
SCONTROL = f"""\
#!/bin/sh
printf '%s\\n' {" ".join(NODES)}
"""
SERVER = f"""\
#!{sys.executable}
import os, signal, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

notes = Path(os.environ["NOTES"])
if os.environ["NODE"] == os.environ.get("BROKEN"):
    sys.exit(3)

class Health(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

def stop(*_):
    (notes / ("stopped-" + os.environ["NODE"])).touch()
    os._exit(0)

signal.signal(signal.SIGTERM, stop)
(notes / ("flags-" + os.environ["NODE"])).write_text(" ".join(sys.argv[1:]))
HTTPServer((os.environ["NODE"], int(sys.argv[sys.argv.index("--port") + 1])), Health).serve_forever()
"""


@dataclass(frozen=True, slots=True)
class Cluster:
    folder: Path
    port: int

    def run(self, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {
            "PATH": f"{self.folder}:{os.environ['PATH']}",
            "NOTES": str(self.folder),
            "LOGS": str(self.folder / "logs"),
            "PORT": str(self.port),
            "STATE_DIR": "/somewhere/state",
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "whatever",
            "MODEL": "some/model",
            "POLL_SECONDS": "0.2",
        }
        return subprocess.run(
            ["bash", str(SCRIPT)],
            env=environment | variables,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=60,
        )

    def notes(self, what: str) -> dict[str, str]:
        return {path.name.removeprefix(what): path.read_text() for path in self.folder.glob(f"{what}*")}


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("darts-server", SERVER)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    with socket.create_server(("localhost", 0)) as free:
        return Cluster(tmp_path, free.getsockname()[1])


def test_the_trainer_starts_when_all_servers_are_healthy_and_they_stop_when_it_ends(cluster: Cluster) -> None:
    train = 'echo "$ROLLOUT_URLS $VLLM_API_KEY $DARTS_ADMIN_API_KEY" >"$NOTES/trained"'
    ended = cluster.run(TRAIN=train, SERVE_FLAGS="--redundancy 2")
    assert ended.returncode == 0, ended.stderr
    urls, *keys = cluster.notes("trained")[""].split()
    assert urls == f"http://localhost:{cluster.port},http://127.0.0.2:{cluster.port}"
    assert [len(key) for key in keys] == [64, 64]
    assert len(set(keys)) == 2
    flags = f"serve some/model --host 0.0.0.0 --port {cluster.port} --state-dir /somewhere/state --redundancy 2"
    assert cluster.notes("flags-") == {"localhost": flags, "127.0.0.2": flags}
    assert set(cluster.notes("stopped-")) == {"localhost", "127.0.0.2"}


def test_a_server_that_does_not_start_ends_the_job_and_the_other_servers(cluster: Cluster) -> None:
    ended = cluster.run(TRAIN='touch "$NOTES/trained"', BROKEN="127.0.0.2")
    assert ended.returncode == 1
    assert "127.0.0.2 did not start" in ended.stderr
    assert not cluster.notes("trained")
    assert set(cluster.notes("stopped-")) == {"localhost"}


def test_given_keys_are_kept_and_the_job_exits_with_the_code_of_its_trainer(cluster: Cluster) -> None:
    keys = {"VLLM_API_KEY": "sesame", "DARTS_ADMIN_API_KEY": "simsalabim"}
    ended = cluster.run(TRAIN='echo "$VLLM_API_KEY $DARTS_ADMIN_API_KEY" >"$NOTES/trained"; exit 5', **keys)
    assert ended.returncode == 5
    assert len(cluster.notes("stopped-")) == 2
    assert cluster.notes("trained")[""].strip() == "sesame simsalabim"
