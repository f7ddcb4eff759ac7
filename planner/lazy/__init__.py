"""Planning at the first training call.

In: a module, or a function that trains, without example inputs. Out: the same, planned with the inputs of its
first training call: by a plan from a file, by the plan of rank 0, or by a new one.
"""
