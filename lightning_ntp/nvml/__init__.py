"""NVIDIA's driver, asked in a process of its own."""

NvmlSource = None
