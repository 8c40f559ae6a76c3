"""Cache hits equal cold runs, exactly, in a subset of the settings of ``make verify-long``.

Cold runs are shared between the servers, so a hit on one is compared with a cold run on another.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from sglang_bitexact.verify.answer import Answer
from sglang_bitexact.verify.local import run_configuration
from sglang_bitexact.verify.long import built_trees
from sglang_bitexact.verify.matrix import Configuration, short_configurations, short_plans
from sglang_bitexact.verify.record import Log
from sglang_bitexact.verify.report import NoProgress, describe
from sglang_bitexact.verify.tally import Summary

pytestmark = pytest.mark.ci

_CONFIGURATIONS = {configuration.name: configuration for configuration in short_configurations()}
_EACH = pytest.mark.parametrize("name", _CONFIGURATIONS)
_ON = pytest.mark.parametrize("name", [name for name, c in _CONFIGURATIONS.items() if c.mode == "on"])


@dataclass
class Servers:
    """What each configuration gave; all are run when the first is asked for, two at a time."""

    trees: dict[str, Path]
    checkpoint: Path
    folder: Path
    cold: dict[str, Answer] = field(default_factory=dict)
    done: dict[str, Future[Summary]] = field(default_factory=dict)

    def summary(self, name: str) -> Summary:
        if not self.done:
            with ThreadPoolExecutor(2) as pool:
                self.done = {each: pool.submit(self._run, c) for each, c in _CONFIGURATIONS.items()}
        return self.done[name].result()

    def _run(self, configuration: Configuration) -> Summary:
        return run_configuration(
            configuration,
            short_plans(configuration),
            tree=self.trees[configuration.mode],
            checkpoint=self.checkpoint,
            folder=self.folder / configuration.name,
            cold=self.cold,
            log=Log(),
            progress=NoProgress(),
        )


@pytest.fixture(scope="module")
def servers(checkpoint, tmp_path_factory) -> Servers:
    folder = tmp_path_factory.mktemp("exact")
    return Servers(built_trees(folder / "dist"), checkpoint, folder)


def test_stock_differs(servers):
    """The same prompts find the fault where it is; cold runs agree there as well."""
    summary = servers.summary("stock")
    assert summary.cold.differing_outputs == 0
    for tier in _CONFIGURATIONS["stock"].tiers:
        assert summary.of(tier=tier).differing_outputs > 0


@_ON
def test_no_hit_differs(servers, name):
    assert [describe(record) for record in servers.summary(name).differing] == []


@_EACH
def test_every_tier_is_hit(servers, name):
    assert servers.summary(name).missing(_CONFIGURATIONS[name].tiers) == []


def test_at_least_500_comparisons(servers):
    assert sum(servers.summary(name).of().comparisons for name, c in _CONFIGURATIONS.items() if c.mode == "on") >= 500
