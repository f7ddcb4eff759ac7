"""From a schedule to functions.

In: a joint graph and the sequence of operations that its backward runs. Out: functions for forward and
backward, which free memory exactly when the simulator frees it. ``partition.py`` makes two graphs,
``lowerings.py`` makes functions of them: of generated Python (``codegen.py``), or by Inductor
(``inductor.py``).
"""
