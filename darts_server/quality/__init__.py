"""The quality head: predicts from hidden states whether a trajectory will be correct, trained on-line from rewards.

`head` joins the parts: `features` standardises hidden states, `replay` stores labelled ones, `network` is the MLP with
its optimiser, `evaluation` measures scores on labels that were not trained on yet, `snapshot` is a trained head, and
`serialization` turns it into bytes. `remote` scores without torch, by snapshots of a head that `trainer` trains in
another process; `trainer_process` starts and ends that process, and `messages` and `report` go through its pipes.
"""
