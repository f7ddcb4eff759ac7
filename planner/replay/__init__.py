"""Following a plan by replaying operators: eager stays eager, and what the plan drops is made again when asked for."""
