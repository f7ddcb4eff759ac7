"""From a captured step to the solvers' graph, and back."""
