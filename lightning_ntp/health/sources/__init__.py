"""Sources besides the driver: what people and cluster managers say, and which ranks are slower than their peers."""

from lightning_ntp.health.sources.file import FileSource
from lightning_ntp.health.sources.stragglers import StragglerSource
from lightning_ntp.health.sources.web import HttpSource

__all__ = ["FileSource", "HttpSource", "StragglerSource"]
