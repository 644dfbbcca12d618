"""Placement of experts on GPUs and NUMA nodes."""
