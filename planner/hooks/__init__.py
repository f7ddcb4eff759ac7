"""What watches a planned graph while it runs."""
