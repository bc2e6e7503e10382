"""``python -m darts_server.ray.child PID ...``: ``python -m darts_server ...`` that ends with its parent process."""

import runpy
import sys

from darts_server.vllm.plugin import end_with_process

if __name__ == "__main__":
    end_with_process(int(sys.argv.pop(1)))
    runpy.run_module("darts_server", run_name="__main__", alter_sys=True)
