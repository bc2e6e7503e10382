"""One address in front of several servers.

::

    command.py     darts-server ingress: flags, start and end of the process
    app.py         the wiring, and what each request goes through
    routes.py      which requests go to one replica, to the one that knows an id, to all of them
    guard.py       host names, web pages, the size of bodies; errors in OpenAI's form
    replicas/      a replica, all of them, and which of them serve
    forwarding/    a request sent to one replica and its answer passed on; run again where the replica was lost
    routing/       which replica a request goes to
    everyone/      requests that concern all replicas, and how their answers are merged
    batches/       a batch of prompts, divided among replicas
    metrics.py     the ingress's own metrics

It imports neither vLLM nor torch, and knows a replica only by the protocol in ``replicas/replica.py``.
"""
