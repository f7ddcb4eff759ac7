"""Plans as text for terminals and as figures."""
