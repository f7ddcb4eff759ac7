"""Blocks of the user's code that are recomputed as told, or that have a name for the planner."""
