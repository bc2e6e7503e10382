"""Several engines behind one server: Ray places their hosts, gives them GPUs, and starts them again.

Only ``place.py`` imports Ray: this module is imported before Ray may be.
"""

import os
import secrets

WITHOUT_HEAD_SECONDS = 1_000_000


def prepare_cluster() -> None:
    """Set what a cluster that this process starts has to be started with. Call this before Ray is imported.

    * It refuses others, unless the environment says how Ray is to authenticate: Ray listens on all of the machine's
      addresses, and whoever can reach it may run code.
    * Its processes have the priority of this one. Ray would lower it by 15, and that of the engines with it.
    * They, and this one, go on if its head dies. Ray would end them a minute later.
    """
    if "RAY_AUTH_MODE" not in os.environ:
        os.environ["RAY_AUTH_MODE"], os.environ["RAY_AUTH_TOKEN"] = "token", secrets.token_hex(32)
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", str(WITHOUT_HEAD_SECONDS))
