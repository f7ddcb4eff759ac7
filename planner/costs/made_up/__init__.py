"""The data on which operators run when their allocations are measured."""
