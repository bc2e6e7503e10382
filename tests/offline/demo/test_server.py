"""How the demo, the benchmarks and the tests start servers."""

import subprocess
import sys
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[3]

PROGRAM = """
import sys, time
from pathlib import Path
from darts_server.offline.demo.server import serving

with serving(("tests.offline.demo.answering",), Path(sys.argv[1])) as server:
    print(server.process.pid, flush=True)
    time.sleep(600)
"""


def test_a_program_that_gets_sigterm_stops_its_server(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "server.log")]
    program = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert program.stdout is not None
    server = int(program.stdout.readline())
    assert psutil.pid_exists(server)
    program.terminate()
    assert program.wait(60) != 0
    program.stdout.close()
    assert not psutil.pid_exists(server)
