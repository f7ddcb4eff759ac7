"""A compiled graph with the interface of its hooks, and the calls of a planned module."""
