"""The hidden states of running candidates, from vLLM's workers to the API process.

In a worker: ``watch`` knows who is to be told of what, ``steps`` reads what a step of either model runner has made,
``capture`` takes it out of the step, ``sender`` sends it. In the API process: ``receiver``. Between them: ``wire``.
"""
