"""Every private name and every patch of PyTorch that the project needs."""
