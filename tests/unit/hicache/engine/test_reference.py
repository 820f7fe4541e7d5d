"""The reference engine as a rank: what all ranks of a replica must have alike."""

from __future__ import annotations

from hicache.build import TierSizes
from hicache.config.cache import CacheConfig
from hicache.engine.architecture import PRESETS
from hicache.engine.reference import EngineSettings, _agreed
from hicache.errors import ConfigError
from hicache.testing.ranks import MeetingMember, run_ranks
from hicache.types import Component


def test_ranks_with_and_without_islands_are_refused() -> None:
    """Their pools are alike and their shards have one identity, but each would free other pages."""
    sizes = TierSizes(device={Component.FULL: 20, Component.SWA: 10}, host={})

    def start(member: MeetingMember, *, alike: bool) -> str:
        islands = alike or member.rank == 1
        settings = EngineSettings(PRESETS["full-swa"], 16, sizes, CacheConfig(), islands=islands)
        try:
            assert _agreed(settings, member) == settings
        except ConfigError as error:
            return str(error)
        return ""

    said = run_ranks(2, lambda member: start(member, alike=False))
    assert said == ["islands differs between the ranks of one replica: [False, True]; start all alike"] * 2
    assert run_ranks(2, lambda member: start(member, alike=True)) == ["", ""]
