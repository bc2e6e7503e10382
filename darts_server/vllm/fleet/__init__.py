"""Several engines behind one API process.

`host` runs in its own process beside each engine. `core`, `ranks`, `transport` and `ray_hosts` run in the API process:
they connect to the hosts, place requests, and start hosts again. Only `ray_hosts` imports Ray.
"""
