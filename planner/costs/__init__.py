"""Bytes and seconds: of operations, devices, the optimizer's step and the step as a whole."""
