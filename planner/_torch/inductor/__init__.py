"""Inductor: programs of planned graphs."""
