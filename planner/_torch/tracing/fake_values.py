"""Values that are known although tensors have no data, where these decide what runs."""
