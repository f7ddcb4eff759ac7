"""What CUDA would run, for planning on a machine without it."""
