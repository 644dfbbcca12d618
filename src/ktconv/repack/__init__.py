"""Packed weights into another arrangement, without the source.

`merge`: layer folders into shards. `reshard`: another number of NUMA parts. `tree` reads and
checks folders, `complete` shards; `sources` compares them with a manifest and a model; `derived` is
a conversion whose source is packed weights.
"""
