"""The operations and layouts of CUDA, for planning on a machine without it."""
