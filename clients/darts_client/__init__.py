"""Client for darts-server: groups of trajectories for reinforcement learning, sync and async.

```python
from darts_client import Client

with Client("http://localhost:8000") as client:
    for group in client.rollouts(["1 + 1 =", "2 + 2 ="], group_size=8, max_tokens=512):
        group.lengths
```
"""

from ._async_client import AsyncClient
from ._async_rollouts import AsyncRollouts
from ._batch import Batch
from ._errors import (
    BadRequest,
    ConnectionFailed,
    DartsError,
    GroupFailed,
    NotFound,
    Overloaded,
    ProtocolError,
    ServerFault,
    SessionOver,
    StatusError,
    TimedOut,
    Unauthorized,
)
from ._models import (
    AbortedTrajectory,
    Delta,
    Discard,
    Discarded,
    Done,
    Event,
    FinishReason,
    Group,
    GroupEvent,
    Trajectory,
    TrajectoryEvent,
    Unfinished,
    Usage,
)
from ._prompts import (
    Prompt,
    Prompts,
    PromptSpec,
    RolloutPrompt,
    RolloutPrompts,
)
from ._records import (
    CandidateRecord,
    GroupRecord,
    LoraRecord,
    PromptRecord,
    PromptRewards,
    UpdateRecord,
    WeightsRecord,
)
from ._rewards import (
    Reward,
    RewardCounts,
    to_dataset,
    to_rows,
)
from ._session_groups import RunningSession, SessionGroup
from ._sessions import SessionTrajectory
from ._sync_client import Client
from ._sync_rollouts import Rollouts
from ._votes import Vote, Voter

__all__ = [
    "AbortedTrajectory",
    "AsyncClient",
    "AsyncRollouts",
    "BadRequest",
    "Batch",
    "CandidateRecord",
    "Client",
    "ConnectionFailed",
    "DartsError",
    "Delta",
    "Discard",
    "Discarded",
    "Done",
    "Event",
    "FinishReason",
    "Group",
    "GroupEvent",
    "GroupFailed",
    "GroupRecord",
    "LoraRecord",
    "NotFound",
    "Overloaded",
    "Prompt",
    "PromptRecord",
    "PromptRewards",
    "PromptSpec",
    "Prompts",
    "ProtocolError",
    "Reward",
    "RewardCounts",
    "RolloutPrompt",
    "RolloutPrompts",
    "Rollouts",
    "RunningSession",
    "ServerFault",
    "SessionGroup",
    "SessionOver",
    "SessionTrajectory",
    "StatusError",
    "TimedOut",
    "Trajectory",
    "TrajectoryEvent",
    "Unauthorized",
    "Unfinished",
    "UpdateRecord",
    "Usage",
    "Vote",
    "Voter",
    "WeightsRecord",
    "to_dataset",
    "to_rows",
]
