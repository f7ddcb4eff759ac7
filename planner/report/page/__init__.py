"""A plan as one HTML page: its data, and the files that show them."""
