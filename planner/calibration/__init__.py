"""Measuring the figures of the GPU that is here, for the cost and memory models."""
