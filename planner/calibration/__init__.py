"""Measures the figures of this machine's GPU, for the cost and memory models."""
