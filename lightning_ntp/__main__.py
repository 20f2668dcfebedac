"""``python -m lightning_ntp``: see :mod:`lightning_ntp.cli`."""

from lightning_ntp.cli import main

if __name__ == "__main__":
    main()
