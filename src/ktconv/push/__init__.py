"""`ktconv push`: finished outputs, sent to a repository of the hub."""
