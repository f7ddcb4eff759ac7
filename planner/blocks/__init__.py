"""Blocks: functions and layers that their author marks for recomputation, or names for the planner.

In: a function, class or module that ``planner.recompute`` or ``planner.checkpointable`` decorates. Out: the
same, which recomputes itself in the backward without a plan, and is marked in the graph with one.
"""
