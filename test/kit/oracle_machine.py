"""Rules for hypothesis: random operations on an OracleWorld, a comparison behind each.

A failure is shrunk and printed as the shortest program of operations that still fails.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from sglang.srt.server_args import ServerArgs

from kit.oracle_model import PAGE
from kit.oracle_steps import OracleSteps
from kit.oracle_world import SLOTS, OracleRequest
from kit.tile_cache import file_storage, server_context

# Few prompts, so that they share, part and come again; the first choice is the likeliest.
PATHS = st.lists(st.sampled_from([0, 0, 0, 1, 2]), min_size=1, max_size=5).map(tuple)
# Prompts end at a boundary, just before and behind it, or inside a page.
CUTS = st.sampled_from([0, 0, 1, 2, 100, 255])
WHICH = st.integers(0, SLOTS - 1)
# A new server is worth this many steps.
SERVER_STEPS = 60


class OracleMachine(RuleBasedStateMachine):
    """What a run is made for is set by run_machine()."""

    args: ServerArgs
    core: str
    hicache: bool
    directory: Path
    # Steps of all examples.
    steps = 0
    reused = 0

    @initialize(stride=st.sampled_from([0, 1, 2]))
    def begin(self, stride: int) -> None:
        for file in self.directory.iterdir():
            file.unlink()
        self.world = OracleSteps(self.args, self.directory, self.core, hicache=self.hicache, stride=stride)
        self.since_restart = 0

    def done(self) -> None:
        """A step is over."""
        self.world.compare()
        self.since_restart += 1
        type(self).steps += 1

    # Requests by their phase ------------------------------------------------------

    def _prefilling(self) -> list[OracleRequest]:
        return [r for r in self.world.running if r.stay is not None and r.stay.done < r.stay.length]

    def _decoding(self) -> list[OracleRequest]:
        return [r for r in self.world.running if r.stay is not None and r.stay.done >= r.stay.length]

    def _any(self) -> list[OracleRequest]:
        return self.world.running

    # Rules ------------------------------------------------------------------------

    @precondition(lambda self: len(self.world.running) < SLOTS)
    @rule(path=PATHS, cut=CUTS, loads=st.sampled_from([True, True, False]), part=st.sampled_from([0, 0, 1, 300]))
    def start(self, path: tuple[int, ...], cut: int, loads: bool, part: int) -> None:
        """A new request and its first chunk: all of it, or ``part`` tokens."""
        request = self.world.start(path, len(path) * PAGE - cut, loads=loads)
        self._chunk([request], part, True)
        self.done()

    @precondition(lambda self: self.world.waiting and len(self.world.running) < SLOTS)
    @rule(loads=st.booleans(), part=st.sampled_from([0, 300]))
    def resume(self, loads: bool, part: int) -> None:
        """A retracted request is admitted again."""
        request = self.world.admit(self.world.waiting.pop(0), loads=loads)
        self._chunk([request], part, True)
        self.done()

    @precondition(lambda self: self._prefilling())
    @rule(which=WHICH, part=st.integers(0, 2 * PAGE), publish=st.sampled_from([True, True, True, False]))
    def chunk(self, which: int, part: int, publish: bool) -> None:
        requests = self._prefilling()
        self._chunk([requests[which % len(requests)]], part, publish)
        self.done()

    @precondition(lambda self: len(self._prefilling()) > 1)
    @rule(part=st.integers(0, 2 * PAGE))
    def chunk_two(self, part: int) -> None:
        self._chunk(self._prefilling()[:2], part, True)
        self.done()

    def _chunk(self, requests: list[OracleRequest], part: int, publish: bool) -> None:
        parts = [(r, min(r.stay.length, r.stay.done + (part or r.stay.length))) for r in requests if r.stay]
        self.world.chunk(*parts, publish=publish)

    @precondition(lambda self: self._decoding())
    @rule(which=WHICH)
    def decode_to_boundary(self, which: int) -> None:
        requests = self._decoding()
        request = requests[which % len(requests)]
        assert request.stay is not None
        self.world.decode([request], request.stay.done // PAGE * PAGE + PAGE)
        self.done()

    @precondition(lambda self: self._decoding())
    @rule()
    def decode_token(self) -> None:
        """One token of each request that decodes."""
        requests = self._decoding()
        self.world.decode(requests, min(r.stay.done for r in requests if r.stay) + 1)
        self.done()

    @rule()
    def land(self) -> None:
        self.world.land()
        self.done()

    @precondition(lambda self: self.world.running)
    @rule(which=WHICH, how=st.sampled_from([OracleRequest.finish, OracleRequest.abort, OracleRequest.retract]))
    def end(self, which: int, how: Any) -> None:
        self.world.drop(self.world.running[which % len(self.world.running)], how)
        self.done()

    @rule(path=PATHS)
    def match(self, path: tuple[int, ...]) -> None:
        self.world.expect_match(path)
        self.done()

    @precondition(lambda self: self.hicache)
    @rule(path=PATHS)
    def prefetch(self, path: tuple[int, ...]) -> None:
        self.world.prefetch(path)
        self.done()

    @rule(count=st.integers(1, 3))
    def evict_windows(self, count: int) -> None:
        self.world.evict_windows(count)
        self.done()

    @rule(pages=st.sampled_from([4, 12, 16]))
    def evict_pages(self, pages: int) -> None:
        self.world.evict_pages(pages)
        self.done()

    @precondition(lambda self: self.hicache)
    @rule(count=st.integers(1, 3), windows=st.booleans())
    def evict_host(self, count: int, windows: bool) -> None:
        self.world.evict_host(count, windows=windows)
        self.done()

    @precondition(lambda self: self.hicache)
    @rule()
    def tick(self) -> None:
        self.world.tick()
        self.done()

    @precondition(lambda self: self.hicache)
    @rule()
    def settle(self) -> None:
        self.world.settle()
        self.done()

    @precondition(lambda self: self.since_restart >= SERVER_STEPS)
    @rule()
    def flush(self) -> None:
        self.world.flush()
        self.since_restart = 0
        self.done()

    @precondition(lambda self: self.hicache and self.since_restart >= SERVER_STEPS)
    @rule(lost=st.none() | st.tuples(st.integers(0, 9), st.integers(0, 6), st.booleans()))
    def restart(self, lost: tuple[int, int, bool] | None) -> None:
        self.world.restart(lost)
        self.since_restart = 0
        self.done()

    def teardown(self) -> None:
        world = getattr(self, "world", None)
        if world is not None:
            try:
                world.close()
                type(self).reused += world.reused
            finally:
                world.cache.__exit__()


def run_machine(
    core: str, *, examples: int, steps: int, hicache: bool = True, seed: int | None = None, shrink: bool = True
) -> Any:
    """Run ``examples`` programs of up to ``steps`` operations; the machine class, with what it counted.

    seed: of the programs; None runs the same ones each time. shrink: make a program that fails short.

    Raises:
        AssertionError: or whatever the shortest program that fails raises; its notes have the program.
    """
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with (
        tempfile.TemporaryDirectory(dir=memory) as directory,
        server_context(hicache_swa_host_tile_fraction=0.5, **file_storage(Path(directory))) as args,
    ):
        made_for = {"args": args, "core": core, "hicache": hicache, "directory": Path(directory)}
        machine = type("OracleMachine", (OracleMachine,), made_for)
        settings = hypothesis.settings(
            max_examples=examples,
            stateful_step_count=steps,
            derandomize=seed is None,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate, Phase.shrink] if shrink else [Phase.generate],
            report_multiple_bugs=False,
        )
        if seed is not None:
            hypothesis.seed(seed)(machine)
        run_state_machine_as_test(machine, settings=settings)
        return machine
