"""The graphs that Dynamo makes of a step, inside of it while it is captured."""
