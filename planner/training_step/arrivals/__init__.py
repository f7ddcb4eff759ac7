"""Hooks that run where the gradient of a weight arrives, as those that step an optimizer in the backward."""
