"""Many conversions, one after the other or some at once: a list of them, and a table of states."""
