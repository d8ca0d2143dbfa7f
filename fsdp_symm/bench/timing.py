"""How long a way takes alone, what it costs the host, and what it does to a matrix product beside it.

All ways of a benchmark take turns within every round, so that clocks and neighbours hit them alike, and a ratio is one
round's: median and extremes are taken over rounds. A time is that of the slowest rank.

Before a timed loop the stream is kept busy with matrix products for about as long as the host needs to queue the
loop: the events then enclose device time, also where a call takes the host longer than the device. A call that waits
for the device cannot be queued ahead: its time is what passes on the device, the gaps that its waiting leaves included.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from fsdp_symm.bench.launch import World, synchronize

ROUNDS = 5
_GEMM_ROUNDS = 7  # products beside calls vary more than calls alone
_ROUND_US = 6000.0  # device time of one way's loop in a round, as a goal
_CALLS = (4, 24)  # fewest and most calls of such a loop
_HEAD_GEMMS = 128  # at most this many products in front of a loop: 46 ms on an H200 of one's own
_GEMMS = (12, 200)  # fewest and most products of one loop
_LONG_CALLS = 3  # a loop of products lasts as long as this many calls, where calls are longer than products
_BESIDE = (1, 16)  # fewest and most calls queued beside each product
_COVERED = 0.9  # a product counts as "beside" when calls cover this much of it


@dataclass(frozen=True)
class Way:
    """One way to do the work.

    Attributes:
        name: the variant.
        run: one call, on the current stream.
        wrong: what is wrong with the result of the last call, ``None`` if nothing is.
        poison: makes the last result wrong, so that a call that does nothing is found out.
        waits: whether a call waits for the device on the host.
    """

    name: str
    run: Callable[[], object]
    wrong: Callable[[], str | None]
    poison: Callable[[], object]
    waits: bool = False


@dataclass
class Timed:
    """Samples of one way, one a round, in microseconds of the slowest rank.

    Attributes:
        alone, host: a call's device and host time.
        under: a call's device time while products run.
        slowdown: of the products beside it, in percent; one a round that had any.
        beside: products that were beside it, over all ranks and rounds.
    """

    alone: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)
    under: list[float] = field(default_factory=list)
    slowdown: list[float] = field(default_factory=list)
    beside: int = 0


class Beside(NamedTuple):
    """What one loop beside products queues: so many products, and so many groups of so many calls."""

    products: int
    groups: int
    calls: int

    @staticmethod
    def of(product_us: float, call_us: float) -> Beside:
        """Calls for about as long as there are products; enough products that some calls lie wholly beside them."""
        call_us = max(call_us, 1.0)
        if call_us <= product_us:
            return Beside(_GEMMS[0], _GEMMS[0], _between(math.ceil(1.2 * product_us / call_us), _BESIDE))
        products = _between(math.ceil(_LONG_CALLS * call_us / max(product_us, 1.0)), _GEMMS)
        return Beside(products, math.ceil(1.2 * products * product_us / call_us), 1)


class Product:
    """The matrix product: one process's own, the same for all ways."""

    def __init__(self, device: torch.device) -> None:
        rows, inner, columns = (4096, 4096, 8192) if device.type == "cuda" else (64, 64, 64)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._a = torch.randn(rows, inner, device=device, dtype=dtype)
        self._b = torch.randn(inner, columns, device=device, dtype=dtype)
        self._out = torch.empty(rows, columns, device=device, dtype=dtype)
        self.us = 0.0  # alone, as measured last

    def run(self) -> None:
        """Queue one."""
        torch.mm(self._a, self._b, out=self._out)


def _mark(device: torch.device) -> Any:
    """This moment on the current stream."""
    if device.type != "cuda":
        return time.perf_counter() * 1e6
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _us(first: Any, last: Any) -> float:
    """Microseconds between two marks that the device has reached."""
    return last - first if isinstance(first, float) else first.elapsed_time(last) * 1e3


def check(world: World, ways: Sequence[Way], what: str) -> None:
    """Run every way twice on a poisoned result and compare.

    Raises:
        SymmMemError: on every rank, when any rank has a wrong result.
    """
    for way in ways:
        for _ in range(2):  # twice: a second call uses another slot
            way.poison()
            world.meet()
            with world.on_side():
                way.run()
            synchronize(world.device)
            world.agree_that(way.wrong(), f"{what} by {way.name}")


class Clock:
    """Times the ways of one benchmark, in some rounds of all of them."""

    def __init__(self, world: World, rounds: int = ROUNDS) -> None:
        self._rounds = rounds
        self._world = world
        self._device = world.device
        self._product = Product(world.device)
        for _ in range(3):
            self._product.run()

    def time_all(self, ways: Sequence[Way], beside: Collection[str] | None = None) -> dict[str, Timed]:
        """Samples of every way; :func:`check` them first.

        Args:
            ways: all of them take turns.
            beside: names of those that also run beside products; by default all.
        """
        times = {way.name: Timed() for way in ways}
        self._product.us = self._products_alone()[0]
        first = {way.name: self._loop(way, _CALLS[0], 0) for way in ways}  # warm, and how many calls make a round
        calls = {name: _between(math.ceil(_ROUND_US / max(us, 1.0)), _CALLS) for name, (us, _) in first.items()}
        for _ in range(self._rounds):
            for way in ways:
                count = calls[way.name]
                us, host_us = self._loop(way, count, self._head(way, count * first[way.name][1]))
                times[way.name].alone.append(us)
                times[way.name].host.append(host_us)
        chosen = [way for way in ways if beside is None or way.name in beside]
        for _ in range(_GEMM_ROUNDS if chosen else 0):
            alone = self._products_alone()[1]
            for way in chosen:
                self._beside(way, times[way.name], alone)
        return times

    @property
    def product_us(self) -> float:
        """A product alone, as measured last."""
        return self._product.us

    def _head(self, way: Way, host_us: float) -> int:
        """Products that keep the device busy while the host queues; none before calls that would wait for them."""
        if way.waits or self._world.side is None:
            return 0
        return min(_HEAD_GEMMS, math.ceil(host_us / max(self._product.us, 1.0)) + 1)

    def _loop(self, way: Way, count: int, head: int) -> tuple[float, float]:
        """Device and host microseconds of a call, the slowest rank's."""
        self._world.meet()
        with self._world.on_side():
            for _ in range(head):
                self._product.run()
            first = _mark(self._device)
            start = time.perf_counter()
            for _ in range(count):
                way.run()
            host_us = (time.perf_counter() - start) * 1e6 / count
            last = _mark(self._device)
        synchronize(self._device)
        us, host_us = self._world.slowest([_us(first, last) / count, host_us])
        return us, host_us

    def _products_alone(self) -> tuple[float, list[float]]:
        """Microseconds of a product while nothing but the other ranks' products runs: the slowest rank's, each rank's.

        Ranks that share a GPU share it here as well as beside a way.
        """
        self._world.meet()
        marks = [_mark(self._device)]
        for _ in range(_GEMMS[0]):
            self._product.run()
            marks.append(_mark(self._device))
        synchronize(self._device)
        mine = statistics.median(_us(a, b) for a, b in itertools.pairwise(marks[1:]))
        everybody = [values[0] for values in self._world.all_values([mine])]
        return max(everybody), everybody

    def _beside(self, way: Way, timed: Timed, alone: list[float]) -> None:
        """One round of products on the main stream while the way loops on the side stream."""
        plan = Beside.of(self._product.us, timed.alone[-1])
        self._world.meet()
        head = self._head(way, plan.groups * plan.calls * timed.host[-1])
        zero, products, groups = self._queue_beside(way, plan, head)
        synchronize(self._device)
        spans = [(_us(zero, a), _us(zero, b)) for a, b in groups]
        times = [(_us(zero, a), _us(zero, b)) for a, b in products]
        slow = [end - start for start, end in times if covered(start, end, spans) >= _COVERED * (end - start)]
        busy = [(times[0][0], times[-1][1])]
        calls = [(b - a) / plan.calls for a, b in spans if covered(a, b, busy) >= _COVERED * (b - a)]
        mine = [statistics.median(slow) if slow else 0.0, len(slow), statistics.median(calls) if calls else 0.0]
        everybody = self._world.all_values([float(v) for v in mine])
        found = [(us, one) for (us, n, _), one in zip(everybody, alone, strict=True) if n]
        if found:
            timed.slowdown.append((statistics.mean(us / one for us, one in found) - 1.0) * 100.0)
        timed.beside += int(sum(n for _, n, _ in everybody))
        if (under := max(us for _, _, us in everybody)) > 0.0:
            timed.under.append(under)

    def _queue_beside(
        self, way: Way, plan: Beside, head: int
    ) -> tuple[Any, list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """Queue products and groups of calls, both behind a head: its end, the marks around each of both.

        They are queued in turns, so that neither runs out; in front of calls that wait, all products.
        """
        for _ in range(head):
            self._product.run()
        zero = _mark(self._device)
        if self._world.side is not None:
            self._world.side.wait_stream(torch.cuda.current_stream(self._device))
        products, groups = [], []
        for turn in range(plan.groups):
            due = plan.products if way.waits else (turn + 1) * plan.products // plan.groups
            if way.waits:
                self._queue_products(products, due)
            with self._world.on_side():
                first = _mark(self._device)
                for _ in range(plan.calls):
                    way.run()
                groups.append((first, _mark(self._device)))
            self._queue_products(products, due)
        return zero, products, groups

    def _queue_products(self, products: list[tuple[Any, Any]], due: int) -> None:
        """Queue products on the current stream until there are ``due``."""
        while len(products) < due:
            first = _mark(self._device)
            self._product.run()
            products.append((first, _mark(self._device)))


def _between(value: int, limits: tuple[int, int]) -> int:
    return min(limits[1], max(limits[0], value))


def covered(start: float, end: float, spans: Sequence[tuple[float, float]]) -> float:
    """How much of a time span the others, which do not overlap each other, cover."""
    return sum(max(0.0, min(end, b) - max(start, a)) for a, b in spans)


def ratios(samples: Sequence[float], base: Sequence[float]) -> tuple[float, float, float]:
    """Median and extremes of the ratios of samples that were taken round by round."""
    found = [mine / theirs for mine, theirs in zip(samples, base, strict=True)]
    return statistics.median(found), min(found), max(found)


def columns(timed: Timed, *, base: Timed, base_name: str) -> dict[str, Any]:
    """The figures that :class:`fsdp_symm.bench.schema.Row` has no column for; empty where nothing was measured."""
    middle, low, high = ratios(timed.alone, base.alone)
    line: dict[str, Any] = {f"vs_{base_name}": round(middle, 3)}
    line |= {f"vs_{base_name}_min": round(low, 3), f"vs_{base_name}_max": round(high, 3)}
    line |= spread("host_us", timed.host, 1) | spread("under_gemm_us", timed.under, 1)
    return line | spread("gemm_slowdown_pct", timed.slowdown, 2) | {"gemms_beside": timed.beside}


def spread(name: str, samples: Sequence[float], digits: int) -> dict[str, Any]:
    """Median and extremes as three columns."""
    if not samples:
        return {name: "", f"{name}_min": "", f"{name}_max": ""}
    values: Mapping[str, float] = {"": statistics.median(samples), "_min": min(samples), "_max": max(samples)}
    return {f"{name}{suffix}": round(value, digits) for suffix, value in values.items()}
