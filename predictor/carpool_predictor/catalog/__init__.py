"""Published architectures by name."""
