"""Examples of lightning_ntp."""
