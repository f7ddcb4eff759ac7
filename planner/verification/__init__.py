"""Comparing the planned step with the unplanned one, and measuring both."""
