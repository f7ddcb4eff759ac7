"""Steps whose tensors have shapes and no data, and values that are known all the same."""
