"""Strides of kernels' results, where PyTorch's shape functions tell other ones."""
