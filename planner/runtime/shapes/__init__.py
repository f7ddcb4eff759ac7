"""Inputs of other shapes than those that were planned."""
