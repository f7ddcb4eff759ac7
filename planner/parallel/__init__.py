"""Training on many ranks: what one of them holds, predicted without the others."""
