"""Descriptions of a path's contents, of how experts were found, and of this machine."""

from ktconv import callable_module

callable_module(__name__)
