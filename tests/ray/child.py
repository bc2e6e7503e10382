"""In place of a darts-server: ``python -m tests.ray.child PID serve ... --host HOST --port PORT``.

It prints the id of a process that it starts, and answers requests with its own. With ``slow`` it is healthy after a
request for ``/ready``, with ``stubborn`` it ignores SIGTERM, with ``failing`` it exits at once.
"""

import os
import signal
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

from darts_server.vllm.plugin import end_with_process

FAILED = 3
ready = "slow" not in sys.argv


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        global ready
        ready = ready or self.path == "/ready"
        self._answer(200 if ready else 503, b"")

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(200, b'{"server": %d}' % os.getpid())

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


if __name__ == "__main__":
    end_with_process(int(sys.argv[1]))
    assert sys.argv[2] == "serve"
    if "failing" in sys.argv:
        sys.exit(FAILED)
    if "stubborn" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    engine = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print(engine.pid, flush=True)
    port = int(sys.argv[sys.argv.index("--port") + 1])
    HTTPServer((sys.argv[sys.argv.index("--host") + 1], port), Handler).serve_forever()
