"""The demo on kind, for a machine that has Docker but neither the cluster's binaries nor Go to build them."""
