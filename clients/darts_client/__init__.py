"""Client for darts-server: groups of trajectories for reinforcement learning, sync and async.

```python
from darts_client import Client

with Client("http://localhost:8000") as client:
    [group] = client.completions("1 + 1 =", group_size=8, max_tokens=512)
    group.lengths
```
"""

from ._async import AsyncClient
from ._errors import (
    BadRequest,
    ConnectionFailed,
    DartsError,
    NotFound,
    Overloaded,
    ProtocolError,
    ServerFault,
    StatusError,
    TimedOut,
    Unauthorized,
)
from ._models import FinishReason, Group, Trajectory
from ._requests import Prompt, Prompts
from ._sync import Client

__all__ = [
    "AsyncClient",
    "BadRequest",
    "Client",
    "ConnectionFailed",
    "DartsError",
    "FinishReason",
    "Group",
    "NotFound",
    "Overloaded",
    "Prompt",
    "Prompts",
    "ProtocolError",
    "ServerFault",
    "StatusError",
    "TimedOut",
    "Trajectory",
    "Unauthorized",
]
