"""The rollout backend `darts` of veRL: `actor_rollout_ref.rollout.name=darts`. Needs the extra `darts-client[verl]`.

veRL loads `plugin` by the entry point of the group `verl.plugins`. No other part of the client imports this package.
"""
