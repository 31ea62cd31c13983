"""Which process of how many this is, and how processes wait for each other.

Ranks of a stage that works on files need no collective operation: they meet at the launcher's key-value store. Ranks
that train one head form a process group, and so do those that hold one target together (tensor parallel), of their own.
Knows neither the work nor its data.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar

import torch
from torch import distributed
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from mtp_train.core.errors import UserError

T = TypeVar("T")
PATIENCE = timedelta(days=7)  # a launcher stops all ranks when one fails: waiting is for slow ones


@dataclass
class Ranks:
    """This process's place among the run's. `group` consecutive ranks work as one unit."""

    rank: int = 0
    world: int = 1
    group: int = 1
    store: Store | None = None
    _meetings: int = field(default=0, repr=False)

    @property
    def main(self) -> bool:
        return self.rank == 0

    @property
    def unit(self) -> int:
        """Which unit of work this rank belongs to, of `units`."""
        return self.rank // self.group

    @property
    def units(self) -> int:
        return self.world // self.group

    @property
    def leader(self) -> bool:
        """Whether this rank speaks for its unit."""
        return self.rank % self.group == 0

    def mine(self, items: list[T]) -> list[T]:
        """This unit's share of a list that all ranks agree on: round robin."""
        return items[self.unit :: self.units]

    def wait(self) -> None:
        """Return once every rank is here."""
        if self.world == 1:
            return
        assert self.store is not None, "several ranks meet at a store"
        self._meetings += 1
        key = f"mtp_train/meeting/{self._meetings}"
        if self.store.add(key, 1) == self.world:
            self.store.set(f"{key}/open", "yes")
        self.store.wait([f"{key}/open"], PATIENCE)

    def all_say(self, what: str, patience: timedelta) -> bool:
        """Whether every rank says `what`, each thing once, before the patience of this one ends."""
        if self.world == 1:
            return True
        assert self.store is not None, "several ranks meet at a store"
        key = f"mtp_train/said/{what}"
        if self.store.add(key, 1) == self.world:
            self.store.set(f"{key}/by_all", "yes")
        try:
            self.store.wait([f"{key}/by_all"], patience)
        except distributed.DistStoreError:
            return False
        return True

    def join(self, backend: str) -> None:
        """Form the process group of all ranks.

        torch would meet at the launcher's store itself, and find there the addresses of ranks that died.
        """
        assert self.store is not None, "several ranks meet at a store"
        store = PrefixStore("mtp_train/all", self.store)
        distributed.init_process_group(backend, store=store, rank=self.rank, world_size=self.world)

    def grouped(self, size: int) -> Ranks:
        """The same ranks, `size` of them to a unit, each unit in a process group of its own."""
        if size == 1:
            return self
        if self.world % size or self.store is None:
            raise UserError(
                "the number of ranks must be a multiple of tensor_parallel",
                f"{self.world} ranks, tensor_parallel {size}",
                f"launch with torchrun --nproc-per-node {size}, or a multiple of it",
            )
        ranks = Ranks(self.rank, self.world, size, self.store, self._meetings)
        distributed.init_process_group(
            "nccl" if torch.cuda.is_available() else "gloo",
            store=PrefixStore(f"mtp_train/unit/{ranks.unit}", self.store),
            rank=self.rank % size,
            world_size=size,
        )
        return ranks


def leave() -> None:
    """Leave the process group, if this process is in one.

    To be done before the process ends: threads that still wait for other ranks abort it.
    """
    if distributed.is_initialized():
        distributed.destroy_process_group()


def launched_ranks() -> Ranks:
    """This process's place, as the launcher (torchrun, accelerate launch) describes it."""
    environment = os.environ
    world = int(environment.get("WORLD_SIZE", "1"))
    if world == 1:
        return Ranks()
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise UserError(
            "several ranks must be started by torchrun or accelerate launch",
            f"WORLD_SIZE={world} without their store",
            "launch with torchrun --nproc-per-node N -m mtp_train.cli.STAGE ...",
        )
    store = TCPStore(environment["MASTER_ADDR"], int(environment["MASTER_PORT"]), is_master=False)
    # The launcher's store outlives ranks that it starts again: what those before them said there is not for these.
    attempt = f"{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}-of-{world}"
    return Ranks(int(environment["RANK"]), world, store=PrefixStore(f"attempt/{attempt}", store))
