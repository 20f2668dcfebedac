"""Callbacks that belong to the strategy; users find them in :mod:`lightning_ntp.callbacks`."""
