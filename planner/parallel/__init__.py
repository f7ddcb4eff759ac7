"""Training on many ranks.

In: a strategy (``parallel=``). Out: the bytes that one rank holds and allocates around a step, predicted
without the other ranks; and warnings where a module is distributed otherwise than planned.
"""
