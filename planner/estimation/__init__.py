"""What a step takes as it is, and with checkpoints that people place themselves: nothing is solved."""
