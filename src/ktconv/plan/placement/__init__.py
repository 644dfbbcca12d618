"""Which expert runs where."""
