"""Steps whose tensors have shapes and no data: what is known of them all the same."""
