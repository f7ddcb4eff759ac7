"""The largest and the fastest batch within a budget."""
