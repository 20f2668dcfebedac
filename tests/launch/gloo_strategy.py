"""The smallest strategy that can use the launcher: Lightning's DDP over gloo, on the supervisor's store."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy

from lightning_ntp.launch import RankIdentity, is_rank
from lightning_ntp.lightning.launcher import NTPLauncher


class GlooStrategy(DDPStrategy):
    def __init__(self, ntp_start_method: Any = "popen", **options: Any) -> None:
        super().__init__()
        self._ntp = (ntp_start_method, options)

    def _configure_launcher(self) -> None:
        self._launcher = NTPLauncher(self, *self._ntp)

    def check_before_launch(self) -> None:
        return None

    def set_world_ranks(self) -> None:
        super().set_world_ranks()
        if not is_rank():
            self.cluster_environment.set_global_rank(10**6)

    def setup_distributed(self) -> None:
        self.set_world_ranks()
        if not dist.is_initialized():
            me = RankIdentity.from_environ()
            store = dist.TCPStore(me.store_host, me.store_port, is_master=False)
            dist.init_process_group("gloo", store=store, rank=me.slot, world_size=me.world_size)

    @property
    def root_device(self) -> torch.device:
        return torch.device("cpu")

    def determine_ddp_device_ids(self) -> None:
        return None
