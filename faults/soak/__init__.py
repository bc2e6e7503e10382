"""Run a million groups on the scripted engine, and check that nothing grows, hangs or gets lost."""
