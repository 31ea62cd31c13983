"""Which process of how many this is. The one place below `train` that names accelerate."""

from __future__ import annotations

from dataclasses import dataclass

from accelerate import PartialState


@dataclass(frozen=True)
class Ranks:
    """This process's place among the run's."""

    rank: int = 0
    world: int = 1

    @property
    def main(self) -> bool:
        return self.rank == 0

    def mine(self, items: list[int]) -> list[int]:
        """This rank's share of numbered work units: round robin."""
        return items[self.rank :: self.world]

    def wait(self) -> None:
        """Return once every rank is here."""
        if self.world > 1:
            PartialState().wait_for_everyone()


def current_ranks(cpu: bool) -> Ranks:
    """Join the process group that the launcher describes, if there is one."""
    state = PartialState(cpu=cpu)
    return Ranks(state.process_index, state.num_processes)
