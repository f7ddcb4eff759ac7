"""The problem and its answers: graphs, schedules, what a solver may do and what it found."""
