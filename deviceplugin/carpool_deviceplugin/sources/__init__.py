"""Where the counters of real GPUs come from, besides NVML: what runs on the node already comes first."""
