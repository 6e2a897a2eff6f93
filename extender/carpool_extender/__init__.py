"""The kube-scheduler extender that decides which job shares a GPU with which other jobs."""
