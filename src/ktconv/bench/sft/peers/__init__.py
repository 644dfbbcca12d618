"""Other implementations of the same step. `table.PEERS` lists them; each runs in a process of its
own, which takes turns with ours."""
