"""Interfaces of other projects, on ktconv's runtime."""
