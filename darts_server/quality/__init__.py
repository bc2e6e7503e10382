"""Quality head: predicts from hidden states whether a trajectory will be correct.

`trainer` trains a `head` in a process of its own. `remote` scores by its snapshots, without torch.
"""
