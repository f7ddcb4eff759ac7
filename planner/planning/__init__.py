"""From a module and a budget to a plan."""
