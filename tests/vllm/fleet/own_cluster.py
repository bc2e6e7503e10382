"""Start the cluster of ``--replicas`` without engines, and print what a test checks. Run as a program."""

import asyncio
import json
import stat
import sys
import time

import psutil

from darts_server.vllm.fleet.ray_cluster import prepare_cluster


def listening() -> list[str]:
    """Return the addresses at which this process and its descendants listen."""
    this = psutil.Process()
    connections = (
        connection
        for process in (this, *this.children(recursive=True))
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    )
    return sorted({str(connection.laddr.ip) for connection in connections})


async def place_hosts() -> None:
    """Place two hosts that need nothing, and print where the cluster listens and who may enter its folder."""
    from darts_server.vllm.fleet import ray_hosts

    # The hosts still start when the cluster stops.
    ray_hosts.STOP_SECONDS = 5.0
    async with ray_hosts.Cluster(None, None).place([b"{}", b"{}"], 1):
        folder = ray_hosts.private_folder()
        mode = stat.S_IMODE(folder.parent.stat().st_mode)
        sessions = [entry.name for entry in folder.iterdir()]
        print(json.dumps({"listening": listening(), "mode": oct(mode), "sessions": sessions}), flush=True)


def lose_head() -> None:
    """Kill the head of a cluster, and print how many seconds Ray's end takes then."""
    import ray

    from darts_server.vllm.fleet.ray_hosts import private_folder

    ray.init(address="local", include_dashboard=False, _temp_dir=str(private_folder()))
    for process in psutil.Process().children(recursive=True):
        if process.name() in ("gcs_server", "raylet"):
            process.kill()
    began = time.monotonic()
    ray.shutdown()
    print(json.dumps({"seconds": time.monotonic() - began}))


prepare_cluster()
if "lose-head" in sys.argv:
    lose_head()
else:
    asyncio.run(place_hosts())
