"""One job on many machines, through a Ray cluster.

A `Job` is the name of a kind with JSON arguments; a node runs the function of its kind in a process
of its own and answers with plain messages, so that nothing of ours is pickled. `driver.run_jobs`
hands jobs to a `Scheduler` (`cluster.Cluster` is Ray's), tries what another node can mend again
there, and collects what failed. `conversion` and `units` are the two ends of a conversion: the
driver has plan, locks, journal and final names, a node writes the staged files of one unit.
"""
