"""Power of GPUs: limits and clocks are written by one process, and put back whatever happens."""
