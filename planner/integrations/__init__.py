"""Callbacks for trainers; each module needs the library of its trainer."""
