"""The job's store listens where nobody else can reach it, and where no name server is asked about its clients."""

from __future__ import annotations

from pathlib import Path

from lightning_ntp.launch.hosting import host_store

LOOPBACK = "0100007F"
"""127.0.0.1, as the kernel writes it."""


def test_the_store_listens_on_ipv4_loopback_alone() -> None:
    store = host_store()
    port = f"{store.port:04X}"
    listening = {
        family: [line.split()[1] for line in Path(f"/proc/net/{family}").read_text().splitlines()[1:]]
        for family in ("tcp", "tcp6")
    }
    assert f"{LOOPBACK}:{port}" in listening["tcp"]
    assert not [address for address in listening["tcp6"] if address.endswith(f":{port}") and set(address[:32]) == {"0"}]
    store.set("key", "value")
    assert store.get("key") == b"value"
