"""Capturing a training step.

In: a module and its step. Out: a :class:`~planner.capture.captured_step.CapturedStep`: the eager recording,
the graphs with their joint graphs, and the recording of the step with the graphs in place. Nothing of the
user's changes.

In this order (``capture.py``):

1. ``on_a_copy.py`` copies the module, without data; where the step asks for data, with it.
2. The eager pass records the plain step.
3. The probe runs the step with Dynamo's graphs and notes which outputs get a gradient.
4. The compiled pass has each graph traced into a joint graph (``graphs/graph_runner.py``), and records the
   step with the graphs as single events, again until the step takes the same path twice.
5. Each of the other files looks for one difference between these passes that would change gradients, and
   corrects it or warns of it.
"""
