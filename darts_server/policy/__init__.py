"""The rules that decide how a group is sampled: candidates, deadlines, `auto`, survival of scored candidates, votes.

They use the estimates, and choose the selection rule that the group applies.
"""
