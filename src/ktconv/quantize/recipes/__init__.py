"""Recipes that fit a size: methods for layers and projections, chosen by their measured errors."""
