"""The quality head: hidden states in, chances to end correct out, trained on-line from rewards.

`head` joins the parts: `features` standardises hidden states, `replay` remembers labelled ones, `network` is the MLP
and its optimiser, `evaluation` judges scores by labels that were not trained on yet, `saved` is the head as bytes.
"""
