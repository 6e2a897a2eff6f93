"""Calibration of predictions by finished jobs."""
