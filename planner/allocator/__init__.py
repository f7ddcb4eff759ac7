"""PyTorch's CUDA caching allocator, simulated: how much memory a sequence of allocations reserves."""
