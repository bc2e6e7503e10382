"""Several servers as a Ray Serve application.

::

    command.py      darts-server serve MODEL --replicas N: flags, start and end
    application.py  the deployments: servers, their directory, an ingress; what `serve run darts_server.ray:app` builds
    server.py       the deployment whose replicas run one darts-server each
    directory.py    the deployment that keeps the servers' addresses
    gateway.py      an ingress as a deployment
    process.py      a darts-server as a child process
    child.py        the child's main module
    settings.py     what one application consists of

Ray Serve places the servers, starts them, restarts those that die and stops those that are too many. The servers shape
groups, and the ingress, which is the one of ``darts-server ingress``, routes requests. Only this folder imports Ray.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ray.serve import Application


def app(arguments: Mapping[str, object]) -> "Application":
    """Build the application of ``serve run darts_server.ray:app model=MODEL replicas=2 flags="--max-model-len 8192"``.

    Raises:
        InvalidSetting
    """
    from darts_server.ray.application import build  # the package is imported by processes that do not need Ray
    from darts_server.ray.settings import read_arguments

    return build(read_arguments(arguments))
