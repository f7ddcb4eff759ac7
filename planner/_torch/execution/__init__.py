"""Calling operators, with nothing around them, and what they allocate."""
