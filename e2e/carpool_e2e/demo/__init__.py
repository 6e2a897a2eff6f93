"""The demo: six scenes on a real cluster, each as a user would see it."""
