"""One joint graph: traced, corrected to what eager computes, read as operations on storages."""
