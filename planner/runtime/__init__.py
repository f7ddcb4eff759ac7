"""A planned module at work.

In: a plan and a module. Out: the same module, which trains by the plan whatever inputs come, or runs as it
is with a warning.

In this order:

1. ``install.py`` checks that the plan fits the module and puts a call of its own in place of the module's
   (``plan_call.py``). It follows the plan by graphs (``install.py``) or by replaying (``replayed.py``).
2. At each call ``plan_call.py`` asks its guards whether something else is to run. ``ddp.py`` compares the
   plan with other ranks, once. ``shapes/`` picks the program for the shapes of the arguments.
3. At the first call of a program Dynamo captures the forward. ``backend.py`` compiles each graph by its part
   of the plan, with the hooks of ``planner/hooks/``. ``remap.py`` helps where a graph is not quite the
   planned one; ``first_forward.py`` has the next call captured again where the forward took another path.
4. ``executions.py`` picks the program of a graph that runs several times in a step.
5. An error of the planner anywhere here is a warning, and that part runs without the plan
   (``own_errors.py``).
"""
