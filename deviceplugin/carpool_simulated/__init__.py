"""Simulated GPUs: state on the node that containers and the agent share. Needs nothing but Python."""
