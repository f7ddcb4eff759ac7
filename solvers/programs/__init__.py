"""Integer and linear programs, and the bound that they give."""
