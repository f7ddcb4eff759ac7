"""Making Dynamo's tracing take the path that eager takes."""
