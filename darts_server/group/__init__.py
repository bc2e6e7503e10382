"""The state machine of a group. Read `group` first. No clock, no `await`, and no random numbers of its own."""
