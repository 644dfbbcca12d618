"""What a path contains, how its experts were found, and what this machine is."""
