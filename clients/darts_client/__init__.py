"""Client for darts-server: groups of trajectories for reinforcement learning, sync and async.

```python
from darts_client import Client

with Client("http://localhost:8000") as client:
    for group in client.rollouts(["1 + 1 =", "2 + 2 ="], group_size=8, max_tokens=512):
        group.lengths
```
"""

from ._async import AsyncClient
from ._dataset import to_dataset, to_rows
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
from ._events import Delta, Discard, Done, Event, GroupEvent, TrajectoryEvent
from ._knowledge import (
    CandidateRecord,
    GroupRecord,
    LengthEstimate,
    LoraRecord,
    PromptRecord,
    PromptRewards,
    ShadowRecord,
    UpdateRecord,
    WeightsRecord,
)
from ._models import Discarded, FinishReason, Group, Trajectory, Unfinished, Usage
from ._requests import Prompt, Prompts
from ._rewards import Reward, RewardCounts
from ._rollouts import AsyncRollouts, Rollouts
from ._rollouts_request import PromptSpec, RolloutPrompt, RolloutPrompts
from ._sync import Client
from ._votes import Vote, Voter

__all__ = [
    "AsyncClient",
    "AsyncRollouts",
    "BadRequest",
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
    "GroupRecord",
    "LengthEstimate",
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
    "ServerFault",
    "ShadowRecord",
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
