"""Commands that people run against a cluster, with their own rights: `kubectl carpool status` and others."""
