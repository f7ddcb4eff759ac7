"""A training step: what it is, how it is copied, run, recorded and put back."""
