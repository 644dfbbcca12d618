"""Errors of a conversion, predicted from a sample of its matrices."""
