"""Planning at the first training call: without example inputs, with what is there then."""
