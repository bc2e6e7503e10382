"""The quality head: predicts from hidden states whether a trajectory will be correct, trained on-line from rewards.

`head` is the network with its training, and `snapshot` a trained head at one moment, which scores without torch.
`remote` scores by the snapshots of a head that `trainer` trains in another process.
"""
