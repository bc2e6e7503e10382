"""The environment of a Ray cluster that the server starts."""

import os
import secrets

WITHOUT_HEAD_SECONDS = 1_000_000


def prepare_cluster() -> None:
    """Set the environment of a cluster that this process starts. Call this before Ray is imported."""
    # Listen on the loopback address alone. Ray does so where this flag for other systems is off.
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    # Require a token: other users of this machine can reach the cluster, and its clients may run code.
    if "RAY_AUTH_MODE" not in os.environ:
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    # Ray would lower the priority of its processes by 15, and that of the engines with it.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # Metrics and events have no reader. If the head is dead, this process would wait up to 15 seconds for their last
    # export when it ends, and Ray would end it with an exit code of its own.
    os.environ.setdefault("RAY_enable_metrics_collection", "0")
    os.environ.setdefault("RAY_task_events_report_interval_ms", "0")
    # Ray would end all processes a minute after the head has died.
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", str(WITHOUT_HEAD_SECONDS))
