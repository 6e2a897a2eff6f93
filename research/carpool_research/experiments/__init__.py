"""Published workloads on simulated clusters: HotCloud '20, RAD-RM, Philly and Alibaba."""
