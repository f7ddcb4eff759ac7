"""The plan as data: its records, its file, what it was made with."""
