"""Following a plan by replaying operators: eager stays eager.

Planning uses ``capture``, ``recorder``, ``repeatable``, ``problem``; training ``program``, ``follow``,
``slots``, ``backward``. A *position* counts the operator calls of the module's forward that are no views. An
*event* is any recorded call. A *save* is a tensor that autograd saves in the forward, by number; nodes *ask
for* saves. An *entry* is the row of the backward before which they ask: re-runs come there. A *slot* is a
value that a step looks up, by number. An *instance* is one life of a value in a schedule: each re-run begins
another. To *note* a call is to keep its arguments (a *recipe*), so that it can run again. A *version counter*
is PyTorch's count of writes to a tensor; aliases share it, unless they have one of their own.
"""
