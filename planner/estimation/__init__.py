"""Memory without a plan: of a step as it is, and with checkpoints that people place themselves.

In: a module and its inputs. Out: tables of predicted bytes and seconds. Nothing is solved, but for
:func:`compare`.
"""
