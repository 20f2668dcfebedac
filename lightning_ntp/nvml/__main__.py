"""``python -m lightning_ntp.nvml``: see :mod:`lightning_ntp.nvml.process`."""

from lightning_ntp.nvml.process import main

if __name__ == "__main__":
    main()
