"""Following a plan by replaying operators: eager stays eager."""
