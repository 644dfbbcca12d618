"""The machine: CPU, memory, NUMA nodes, threads, files, text for terminals."""
