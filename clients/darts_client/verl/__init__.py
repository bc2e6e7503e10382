"""The rollout backend `darts` of veRL: `actor_rollout_ref.rollout.name=darts`. Needs the extra `darts-client[verl]`.

veRL loads `plugin` by the entry point of the group `verl.plugins`. No other part of the client imports this package.

    plugin    registers the backend, when veRL is imported
    groups    names each request's group, in the processes of veRL's agent loops
    replica   starts a server actor for each replica
    server    the actor: a darts-server process, its requests and its control
    process   that process, and its end when the actor ends
    weights   the trainer's weights as files, and the checkpoint engine `darts`
"""
