"""What a path contains, how its experts were found, and what this machine is."""

from ktconv import callable_module

callable_module(__name__)
