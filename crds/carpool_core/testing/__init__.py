"""Stateful fakes of the ports, for tests of every package."""
