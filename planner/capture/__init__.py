"""The three passes that capture a training step."""
