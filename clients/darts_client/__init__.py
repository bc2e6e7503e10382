"""Client for darts-server: groups of trajectories for reinforcement learning, sync and async.

```python
from darts_client import Client

with Client("http://localhost:8000") as client:
    for group in client.rollouts(["1 + 1 =", "2 + 2 ="], group_size=8, max_tokens=512):
        group.lengths
```
"""

from ._async_client import AsyncClient as AsyncClient
from ._async_rollouts import AsyncRollouts as AsyncRollouts
from ._batch import Batch as Batch
from ._errors import BadRequest as BadRequest
from ._errors import ConnectionFailed as ConnectionFailed
from ._errors import DartsError as DartsError
from ._errors import NotFound as NotFound
from ._errors import Overloaded as Overloaded
from ._errors import ProtocolError as ProtocolError
from ._errors import ServerFault as ServerFault
from ._errors import StatusError as StatusError
from ._errors import TimedOut as TimedOut
from ._errors import Unauthorized as Unauthorized
from ._models import AbortedTrajectory as AbortedTrajectory
from ._models import Delta as Delta
from ._models import Discard as Discard
from ._models import Discarded as Discarded
from ._models import Done as Done
from ._models import Event as Event
from ._models import FinishReason as FinishReason
from ._models import Group as Group
from ._models import GroupEvent as GroupEvent
from ._models import Trajectory as Trajectory
from ._models import TrajectoryEvent as TrajectoryEvent
from ._models import Unfinished as Unfinished
from ._models import Usage as Usage
from ._prompts import Prompt as Prompt
from ._prompts import Prompts as Prompts
from ._prompts import PromptSpec as PromptSpec
from ._prompts import RolloutPrompt as RolloutPrompt
from ._prompts import RolloutPrompts as RolloutPrompts
from ._records import CandidateRecord as CandidateRecord
from ._records import GroupRecord as GroupRecord
from ._records import LoraRecord as LoraRecord
from ._records import PromptRecord as PromptRecord
from ._records import PromptRewards as PromptRewards
from ._records import UpdateRecord as UpdateRecord
from ._records import WeightsRecord as WeightsRecord
from ._rewards import Reward as Reward
from ._rewards import RewardCounts as RewardCounts
from ._rewards import to_dataset as to_dataset
from ._rewards import to_rows as to_rows
from ._sync_client import Client as Client
from ._sync_rollouts import Rollouts as Rollouts
from ._votes import Vote as Vote
from ._votes import Voter as Voter
