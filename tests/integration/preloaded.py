"""Has imported all that an engine's processes import, and makes vLLM fork them: for Python's fork server."""

from tests.integration.fork_server import import_server, import_vllm

import_vllm()
import_server()
