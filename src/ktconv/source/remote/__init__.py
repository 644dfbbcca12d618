"""Sources that are read over a network while they are converted: the hub, object stores, https."""
