"""`ktconv push`: finished outputs, sent to a repository of the hub."""

from ktconv import callable_module

callable_module(__name__)
