"""A million groups on the scripted engine: does anything grow, get stuck, or get lost?"""
