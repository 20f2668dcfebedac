"""Real worlds for tests: ``world(4).run(fn)`` calls ``fn`` in four processes that look like launched ranks.

A fork server (one exec'ed process that has imported torch and Lightning and computed nothing) forks the ranks, so that
a world of nine costs well under a second, and pytest itself never forks with torch's threads in it.
"""

from tests.harness.world import Crew, Outcome, RankError, Run, World

__all__ = ["Crew", "Outcome", "RankError", "Run", "World"]
