"""Rules for hypothesis: random operations on an OracleWorld, a comparison behind each.

A failure is shrunk and printed as the shortest program of operations that still fails.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import hypothesis
from hypothesis import HealthCheck, Phase
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from sglang.srt.server_args import ServerArgs

from kit.oracle_model import PAGE
from kit.oracle_steps import OracleSteps
from kit.oracle_world import PAGES, SLOTS, OracleRequest
from kit.tile_cache import file_storage, server_context

# Few prompts, so that they share, part and come again; the first choice is the likeliest.
PATHS = st.lists(st.sampled_from([0, 0, 0, 1, 2]), min_size=1, max_size=5).map(tuple)
# Prompts end at a boundary, just before and behind it, or inside a page.
CUTS = st.sampled_from([0, 0, 1, 2, 100, 255])
PARTS = st.sampled_from([0, 0, 1, 300])
# One of the last prompts, or none of them.
AGAIN = st.integers(0, SLOTS)
WHICH = st.integers(0, SLOTS - 1)
ENDS = [OracleRequest.finish, OracleRequest.finish, OracleRequest.abort, OracleRequest.retract]
# A file that is damaged while no server runs: of which window, of which pool, and how.
LOST = st.tuples(st.integers(0, 9), st.integers(0, 9), st.sampled_from(["gone", "short", "changed"]))
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
    tally: ClassVar[Counter[str]] = Counter()

    @initialize(stride=st.sampled_from([0, 1, 2]))
    def begin(self, stride: int) -> None:
        for file in self.directory.iterdir():
            file.unlink()
        self.world = OracleSteps(self.args, self.directory, self.core, hicache=self.hicache, stride=stride)
        self.since_restart, self.broken = 0, False
        self.started: list[tuple[int, ...]] = []

    @contextlib.contextmanager
    def step(self) -> Iterator[OracleSteps]:
        """One operation; a step's result is processed with the next one at the latest."""
        self.broken = True
        yield self.world
        while len(self.world.flying) > 1:
            self.world.land()
        self.world.compare()
        self.broken = False
        self.since_restart += 1
        type(self).steps += 1

    def path(self, path: tuple[int, ...], again: int) -> tuple[int, ...]:
        """``path``, or one that begins as a former prompt: a later turn, or the same again."""
        if again >= len(self.started):
            return path
        return (*self.started[again], *path[1:])[:5]

    # Requests by their phase ------------------------------------------------------

    def _prefilling(self) -> list[OracleRequest]:
        return [r for r in self.world.running if r.stay is not None and r.stay.done < r.stay.length]

    def _decoding(self) -> list[OracleRequest]:
        return [r for r in self.world.running if r.stay is not None and r.stay.done >= r.stay.length]

    # Rules ------------------------------------------------------------------------

    @precondition(lambda self: len(self.world.running) < SLOTS)
    @rule(path=PATHS, again=AGAIN, cut=CUTS, loads=st.sampled_from([True, True, False]), part=PARTS, new=st.booleans())
    def start(self, path: tuple[int, ...], again: int, cut: int, loads: bool, part: int, new: bool) -> None:
        """A new request or a retracted one is admitted, and computes all of its prompt or ``part`` tokens."""
        with self.step() as world:
            if world.waiting and not new:
                request = world.admit(world.waiting.pop(0), loads=loads)
            else:
                path = self.path(path, again)
                self.started = [path, *self.started[: SLOTS - 1]]
                request = world.start(path, len(path) * PAGE - cut, loads=loads)
            self._chunk([request], part, True)

    @precondition(lambda self: self._prefilling())
    @rule(which=WHICH, part=st.integers(0, 2 * PAGE), publish=st.sampled_from([True, True, True, False]))
    def chunk(self, which: int, part: int, publish: bool) -> None:
        """A step of one or two requests: ``part`` tokens of each, or all that is left."""
        with self.step():
            requests = self._prefilling()
            self._chunk(requests[which % len(requests) :][:2], part, publish)

    def _chunk(self, requests: list[OracleRequest], part: int, publish: bool) -> None:
        parts = [(r, min(r.stay.length, r.stay.done + (part or r.stay.length))) for r in requests if r.stay]
        self.world.chunk(*parts, publish=publish)

    @precondition(lambda self: self._decoding())
    @rule(which=WHICH, jump=st.booleans())
    def decode(self, which: int, jump: bool) -> None:
        """One request decodes to its next boundary, or all of them one token."""
        with self.step() as world:
            requests = self._decoding()
            if jump:
                requests = [requests[which % len(requests)]]
            done = min(r.stay.done for r in requests if r.stay)
            world.decode(requests, done // PAGE * PAGE + PAGE if jump else done + 1)

    @precondition(lambda self: self.world.running)
    @rule(which=WHICH, how=st.sampled_from(ENDS))
    def end(self, which: int, how: Any) -> None:
        with self.step() as world:
            world.drop(world.running[which % len(world.running)], how)

    @rule(path=PATHS, again=AGAIN)
    def match(self, path: tuple[int, ...], again: int) -> None:
        with self.step() as world:
            world.expect_match(self.path(path, again))

    @precondition(lambda self: self.hicache)
    @rule(path=PATHS, again=AGAIN)
    def prefetch(self, path: tuple[int, ...], again: int) -> None:
        with self.step() as world:
            world.prefetch(self.path(path, again))

    @rule(what=st.sampled_from(["windows", "windows", "pages", "host windows", "host pages"]), count=st.integers(1, 3))
    def evict(self, what: str, count: int) -> None:
        """count: windows, or host pages; of the device's pages so many quarters must be free."""
        with self.step() as world:
            if what == "windows":
                world.evict_windows(count)
            elif what == "pages":
                world.evict_pages(PAGES * count // 4)
            else:
                world.evict_host(count, windows=what == "host windows")

    @rule(settle=st.booleans())
    def transfers(self, settle: bool) -> None:
        """All results are processed; one look at the transfers, or as many as it takes."""
        with self.step() as world:
            while world.flying:
                world.land()
            if settle:
                world.settle()
            else:
                world.tick()

    @precondition(lambda self: self.since_restart >= SERVER_STEPS)
    @rule(lost=LOST, flush=st.booleans(), pages=st.sampled_from([PAGES, PAGES, PAGES - 4]))
    def server(self, lost: tuple[int, int, str], flush: bool, pages: int) -> None:
        """The cache is flushed, and resized; or another server takes over what is stored, and looks at
        what may be damaged."""
        with self.step() as world:
            if flush or not self.hicache:
                world.flush(pages)
            else:
                world.prefetch(world.restart(lost))
            self.since_restart = 0

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        try:
            # After a failure the two differ anyway.
            if not self.broken:
                self.world.close()
                type(self).reused += self.world.reused
        finally:
            self.world.leave()
            type(self).tally.update(self.world.tally)


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
        made_for = {"args": args, "core": core, "hicache": hicache, "directory": Path(directory), "tally": Counter()}
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
