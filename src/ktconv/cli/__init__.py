"""The command line: options, one library call each, and everything that is printed.

Results go to stdout, progress and errors to stderr. Exit codes: 0 done, 1 a check failed,
2 bad usage or input, 3 I/O or resources, 130 interrupted. `entry` is where a process begins.
"""
