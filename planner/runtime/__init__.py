"""A planned module at work: installing a plan and following it, whatever inputs come."""
