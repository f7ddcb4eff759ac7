"""Methods on cuts and chains of blocks."""
