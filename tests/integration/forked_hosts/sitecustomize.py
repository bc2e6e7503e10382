"""Makes the hosts of engines forks of a process that has imported vLLM: three processes less that import it.

Python imports this module at its start, wherever this folder is in ``PYTHONPATH``.
"""

import os
import signal
import sys

if sys.orig_argv[1:3] == ["-m", "darts_server.vllm.fleet.host"]:
    from tests.integration.fork_server import FORKS, Forks

    host = Forks(os.environ[FORKS]).fork(sys.orig_argv[2:], os.environ, (0, 1, 2))
    signal.signal(signal.SIGTERM, lambda number, _: host.send_signal(number))
    os._exit(host.wait())
