"""The state machine of a group: which candidates run, which are stopped, and which become trajectories.

Read `group` first, then `selection`. Nothing here has a clock, awaits, or creates its own random numbers.
"""
