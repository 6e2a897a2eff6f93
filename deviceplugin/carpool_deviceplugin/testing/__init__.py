"""Stateful fakes of what the node agent talks to, for tests."""
