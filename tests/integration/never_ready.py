"""A worker extension whose import never ends, and with it the start of the engine."""

import signal

print("the engine starts", flush=True)
signal.pause()


class Extension:
    """Never reached."""
