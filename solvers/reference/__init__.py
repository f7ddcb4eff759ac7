"""What solvers compute, written to be read: tests hold the fast forms against these."""
