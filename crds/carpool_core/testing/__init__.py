"""Fake API server and clock for tests."""
