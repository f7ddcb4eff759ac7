"""From a schedule to forward and backward graphs, and from these to functions."""
