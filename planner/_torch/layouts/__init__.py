"""How the results of kernels lie in memory, also where PyTorch says otherwise."""
