"""Random operations on the real caches and on a model of them: same reuse, same bytes, nothing lost.

See kit.oracle_model for what is compared, and kit.oracle_machine for the operations; `make soak-ops`
runs as many as wanted.
"""

from __future__ import annotations

import sys

import pytest
from sglang.test.ci.ci_register import register_cpu_ci

from kit.oracle_machine import run_machine

REASONS = ("off_grid", "pool_full", "tile_evicted")

register_cpu_ci(est_time=40, suite="base-a-test-cpu")


@pytest.mark.parametrize(("hicache", "seed"), [(True, 12), (False, 5)], ids=["three tiers", "device only"])
def test_real_caches_and_model_agree(core, hicache, seed):
    machine = run_machine(core, examples=8, steps=200, hicache=hicache, seed=seed)
    # Most of the programs were of use.
    assert machine.steps > 900
    assert machine.reused > 100
    # With transfers under way, too few of each here to be sure of one: see below.
    assert hicache or min(machine.tally[reason] for reason in REASONS) > 0


@pytest.mark.ci
def test_real_caches_and_model_agree_for_longer(core):
    machine = run_machine(core, examples=64, steps=250, seed=15)
    assert machine.steps > 9_000
    assert machine.reused > 1_000
    assert min(machine.tally[reason] for reason in (*REASONS, "load_rejected")) > 0


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
