"""The worlds of the steady-state benchmark: one model under different strategies."""

from __future__ import annotations

import logging
import os
import socket
import warnings
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import lightning.pytorch as pl
import torch
from _accounts import ACCOUNTS, start_memory
from _gpt import BenchmarkModel, DTensorModel, Size, loader
from _turns import TakeTurns, World
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy

from lightning_ntp import NTPStrategy
from lightning_ntp.launch import RankIdentity

_NAMES = {"ntp": "ntp", "ddp": "DDP", "dtensor": "ModelParallel"}


@dataclass(frozen=True)
class Setting:
    """A strategy at some degrees.

    Args:
        kind: ``"ntp"``, ``"ddp"`` or ``"dtensor"`` (Lightning's ModelParallelStrategy).
        degrees: The tensor-parallel degree of every replica.
        copies: Whether neighbours keep copies of each other's shards (ntp).
    """

    kind: str
    degrees: tuple[int, ...]
    copies: bool = False

    @property
    def ranks(self) -> int:
        return sum(self.degrees)

    @property
    def name(self) -> str:
        shape = f"{len(self.degrees)}x{self.degrees[0]}" if len(set(self.degrees)) == 1 else str(self.degrees)
        return f"{_NAMES[self.kind]} {shape.replace(' ', '')}"

    def start(self, size: Size, clip: bool, accounts: bool = False) -> World:
        """Start its ranks; those that are to be watched allocate memory in a way that costs time."""
        return World(self.name, partial(_train, self, size, clip, accounts, _free_port()), self.ranks)

    def strategy(self) -> Strategy:
        if self.kind == "ntp":
            return NTPStrategy(degrees=self.degrees, redundancy="neighbor" if self.copies else None)
        if self.kind == "ddp":
            return DDPStrategy(process_group_backend="gloo")
        return ModelParallelStrategy(
            data_parallel_size=len(self.degrees), tensor_parallel_size=self.degrees[0], process_group_backend="gloo"
        )


def _train(setting: Setting, size: Size, clip: bool, accounts: bool, port: int, pipe: Connection, rank: int) -> None:
    """What a rank does, until it is killed."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    store: Any = None
    if setting.kind == "ntp":
        if rank == 0:
            # the port was chosen before the ranks were forked, so not by `host_store`
            store = torch.distributed.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        environ = RankIdentity(rank, setting.ranks, f"steady-{rank}", "steady", "127.0.0.1", port).to_environ()
    else:
        environ = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "NODE_RANK": "0",
            "WORLD_SIZE": str(setting.ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
    os.environ.update(environ)
    pl.seed_everything(1, verbose=False)
    if accounts:
        start_memory()
    model = (DTensorModel if setting.kind == "dtensor" else BenchmarkModel)(size)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=setting.ranks,
        strategy=setting.strategy(),
        max_epochs=1,
        gradient_clip_val=1.0 if clip else None,
        callbacks=[TakeTurns(pipe, ACCOUNTS)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, loader(size, len(setting.degrees)))
    del store


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
