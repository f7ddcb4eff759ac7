"""Comparing the planned step with the unplanned one, and measuring both.

In: a plan, a module and its inputs. Out: a :class:`~planner.verification.verify.Report`; the module is left
as it was.
"""
