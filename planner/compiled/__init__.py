"""One compiled graph of a planned module: the interface of its hooks, and the calls of the module.

In: the functions that were generated for a graph. Out: a callable that calls the graph's hooks around them.
"""
