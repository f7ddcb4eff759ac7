"""Inputs of other shapes than planned.

In: the arguments of a call. Out: the program that runs them, whose memory is known to fit these shapes.
"""
