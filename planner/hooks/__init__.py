"""Checks and corrections of a planned graph while it runs."""
