"""The environment of a Ray cluster that the server starts. It has to be set before Ray is imported."""

import os
import secrets

WITHOUT_HEAD_SECONDS = 1_000_000


def prepare_cluster() -> None:
    """Set what a cluster that this process starts has to be started with. Call this before Ray is imported.

    * It listens on this machine's loopback address alone. Ray asks for that by the name of a flag for other systems.
    * It refuses others, unless the environment says how Ray is to authenticate: other users of this machine can reach
      it, and whoever it accepts may run code.
    * Its processes have the priority of this one. Ray would lower it by 15, and that of the engines with it.
    * They, and this one, go on if its head dies. Ray would end them a minute later.
    * It collects no metrics and no events, which have no reader. With a dead head this process would wait up to 15
      seconds for their last export at its end, and Ray would end it with an exit code of its own.
    """
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    if "RAY_AUTH_MODE" not in os.environ:
        os.environ["RAY_AUTH_MODE"], os.environ["RAY_AUTH_TOKEN"] = "token", secrets.token_hex(32)
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ.setdefault("RAY_enable_metrics_collection", "0")
    os.environ.setdefault("RAY_task_events_report_interval_ms", "0")
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", str(WITHOUT_HEAD_SECONDS))
