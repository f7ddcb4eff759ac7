"""Planning.

In: a module, its step, options and a budget. Out: a plan, or an error that says what to do.

In this order:

1. ``options.py`` reads the options, ``backends.py`` checks them against the backend.
2. ``prepare.py`` captures the step, finds bytes and seconds (``cost_source.py``) and builds the problem. Its
   result, :class:`~planner.planning.prepared.Prepared`, serves any number of budgets.
3. ``solve.py`` asks a solver for a schedule (``solve_for.py``): with masks as bits where that is better
   (``encodings.py``), with a lower allowance where an allocator reserves more (``within_budget.py``), judged
   by emitted programs with Inductor (``inductor.py``). ``solve_many.py`` does so for many budgets.
4. ``make_plan.py`` writes the plan.
"""
