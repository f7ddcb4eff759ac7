"""AOTAutograd: from Dynamo's graphs to joint graphs of forward and backward."""
