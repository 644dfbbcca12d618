"""Other implementations of the same layer, measured next to ours on the same weights and routing.

`table.PEERS` lists them; `launch.measure(request)` runs one in a process of its own.
"""
