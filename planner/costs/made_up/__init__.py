"""Data that operators are given where they are run to see what they allocate."""
