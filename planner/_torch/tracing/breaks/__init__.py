"""Where Dynamo ends graphs, and why."""
