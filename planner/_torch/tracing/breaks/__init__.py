"""Private PyTorch APIs: where Dynamo ends graphs, and why."""
