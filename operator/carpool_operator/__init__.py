"""The operator that carries a GpuTrainingJob from admission to its end."""
