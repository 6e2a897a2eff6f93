"""The kube-scheduler extender that decides which GPU a job shares with whom."""
