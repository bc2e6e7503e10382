"""The quality head: hidden states in, chances to end correct out, trained on-line from rewards.

`head` joins the parts: `features` standardises hidden states, `replay` remembers labelled ones, `network` is the MLP
and its optimiser, `evaluation` judges scores by labels that were not trained on yet, `snapshot` is a trained head, and
`saved` the same as bytes. `remote` has a head trained in a process of its own, `trainer`, and scores without torch;
`frames` and `report` are what the two say to each other.
"""
