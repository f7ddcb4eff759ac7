"""Layers that repeat: a step is recorded with a few of them, and the recording is made longer."""
