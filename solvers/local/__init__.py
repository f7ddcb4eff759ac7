"""Improving a schedule step by step, by simulation."""
