"""Quality head: predicts from hidden states whether a trajectory will be correct, and is trained on-line from rewards.

`head` has the network and its training. `snapshot` is a trained head at one moment, which scores without torch.
`remote` scores by the snapshots of a head that `trainer` trains in another process.
"""
