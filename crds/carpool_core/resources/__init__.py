"""`GpuTrainingJob` and `GpuNode` as typed Python. The CRDs are generated from here."""
