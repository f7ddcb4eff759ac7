"""Private PyTorch APIs of Inductor."""
