"""Filters, scores, selection, gangs and diagnosis: pure functions of a snapshot."""
