"""Benchmarks of `make bench`."""
