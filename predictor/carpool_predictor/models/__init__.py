"""Models that evaluate the shipped artifacts."""
