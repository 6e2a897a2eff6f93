"""What `make bench` measures: the way of a job step by step, and the memory of each process."""
