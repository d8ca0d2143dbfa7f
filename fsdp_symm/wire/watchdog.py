"""A host thread that notices when a call of our own wire does not end on the GPU, says who is missing, and ends the
process.

A stream that waits for a flag cannot time out, and a host that waits for that stream cannot raise; going on with
memory that nobody filled would train on garbage. So the process ends, as it does when NCCL's watchdog sees a stuck
collective: the text goes to stderr and to the peers of the same host, then SIGABRT, which torchrun reports.

Calls inside a CUDA graph of the user's have no events, and nobody tells the host when they are replayed: there the
flags themselves are looked at, and a call is stuck when it waits for the same peers whenever it is looked at.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, field

import torch

from fsdp_symm.errors import SymmMemUnavailableError, problem
from fsdp_symm.memory.cuda_driver import cuda_driver
from fsdp_symm.memory.device import DeviceSegment
from fsdp_symm.memory.stream_flags import STARTED, Kind
from fsdp_symm.plan import Lane

_POLL_S = 0.2
_LOOKS = 20  # at flags that seem stuck; each takes some 10 ms
_DEAD_AFTER_S = 2.0  # a peer that has ended may have finished its part: only a call that stays stuck accuses it


@dataclass
class Pending:
    """A call that was enqueued.

    Attributes:
        segment, slot: whose flags it waits for.
        lane, epoch, what: the call.
        event: its end on this rank's stream.
        since: ``time.monotonic()`` of its enqueueing, or of the end of the call before it, whichever is later.
    """

    segment: DeviceSegment
    slot: int
    lane: Lane
    epoch: int
    what: str
    event: torch.cuda.Event
    since: float = field(default_factory=time.monotonic)

    def __str__(self) -> str:
        return f"{self.what}, call {self.epoch} of group {list(self.segment.ranks)}"


class Replayed:
    """Calls of one segment that are parts of the user's CUDA graphs.

    Args:
        segment: whose flags are looked at.
    """

    def __init__(self, segment: DeviceSegment) -> None:
        self.segment = segment
        self.calls: dict[int, str] = {}  # what the last captured call on each slot was
        self._since: dict[tuple[int, tuple[int, ...]], float] = {}  # slot and missing ranks, stuck since

    def verdict(self) -> str | None:
        """Why a replay will not end, or ``None`` while it may."""
        now, segment = time.monotonic(), self.segment
        stuck = self._stuck()
        self._since = {key: self._since.get(key, now) for key in stuck}
        for (slot, late), since in self._since.items():
            if now - since > segment.timeout_s:
                return problem(
                    f"{self.calls[slot]}, replayed by a CUDA graph: ranks {list(late)} have not published their data",
                    found=f"this rank's GPU has waited for {segment.timeout_s:g} s",
                    expected=f"every rank of group {list(segment.ranks)} to replay the same graphs in the same order",
                    fix="look at what those ranks are doing (py-spy dump); raise timeout_s if they are merely slow",
                )
        return None

    def _stuck(self) -> set[tuple[int, tuple[int, ...]]]:
        """Slots that wait, and for whom, in every one of many looks: between two replays no slot waits."""
        stuck = self._waiting()
        for _ in range(_LOOKS):
            if not stuck:
                break
            stuck &= self._waiting()
        return stuck

    def _waiting(self) -> set[tuple[int, tuple[int, ...]]]:
        words, flags = self.segment.read_flags(patience_s=5.0), self.segment.flags
        if words is None or flags is None:
            return set()
        waiting = set()
        for slot in list(self.calls):  # another thread may add one
            late = _late_in(words, self.segment, slot, "ready")
            if late and int(words[flags.stage_index(slot)]) == STARTED:
                waiting.add((slot, tuple(late)))
        return waiting


class Watchdog:
    """One thread for all segments of a process; started by the first call."""

    def __init__(self) -> None:
        self._calls: deque[Pending] = deque()
        self._replayed: dict[int, Replayed] = {}  # by segment
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._process = 0

    def add(self, call: Pending) -> None:
        """Watch a call until its event is reached."""
        self._start()
        self._calls.append(call)
        if not self._wake.is_set():
            self._wake.set()

    def add_captured(self, segment: DeviceSegment, slot: int, what: str) -> None:
        """Watch a slot that is used inside a CUDA graph, until its segment is closed."""
        self._start()
        self._replayed.setdefault(id(segment), Replayed(segment)).calls[slot] = what
        self._wake.set()

    def _start(self) -> None:
        if self._process != os.getpid():  # first use, or a forked child, in which threads do not live on
            self._process = os.getpid()
            self._calls.clear()
            self._replayed.clear()
            self._stop.clear()
            self._thread = threading.Thread(target=self._run, name="fsdp_symm_watchdog", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the thread. An interpreter that shuts down under a thread inside CUDA would abort."""
        self._stop.set()
        self._wake.set()
        if self._thread is not None and self._process == os.getpid():
            self._thread.join(timeout=10 * _POLL_S)

    def _run(self) -> None:
        with contextlib.suppress(SymmMemUnavailableError):  # a machine without a GPU captures nothing
            cuda_driver().stay_out_of_captures()
        while not self._stop.is_set():
            if not self._calls and not self._replayed:
                self._wake.clear()
                if not self._calls and not self._replayed:
                    self._wake.wait()
            self._drop_ended()
            if self._calls and (text := _verdict(self._calls[0])) is not None:
                _end(self._calls[0].segment, text)
            for replayed in list(self._replayed.values()):
                if replayed.segment.closed:
                    del self._replayed[id(replayed.segment)]
                elif (text := replayed.verdict()) is not None:
                    _end(replayed.segment, text)
            self._stop.wait(_POLL_S)

    def _drop_ended(self) -> None:
        while self._calls and self._calls[0].event.query():
            self._calls.popleft()
            if self._calls:
                self._calls[0].since = max(self._calls[0].since, time.monotonic())


def _verdict(call: Pending) -> str | None:
    """Why this call will not end, or ``None`` while it may."""
    age_s = time.monotonic() - call.since
    segment = call.segment
    reported = segment.notices.reported() if segment.notices is not None else None
    if reported is not None:
        return f"{call} is stuck: {reported}"
    if age_s > _DEAD_AFTER_S and segment.notices is not None and (dead := segment.notices.dead_ranks()):
        return problem(
            f"{call}: ranks {dead} are gone",
            found="their processes have ended while this rank's GPU waits for them",
            expected="every rank to reach this call",
            fix="look at the first error those ranks printed, or at the kernel's log for an out-of-memory kill",
        )
    if age_s <= segment.timeout_s:
        return None
    return problem(
        f"{call}: {_late(call)}",
        found=f"not ended on this rank's GPU within {segment.timeout_s:g} s",
        expected="every rank to reach this call",
        fix="look at what those ranks are doing (py-spy dump); raise timeout_s if they are merely slow",
    )


def _late(call: Pending) -> str:
    """Which ranks keep the call waiting: those whose hosts have not come to it, else by the flags on the device."""
    segment, flags = call.segment, call.segment.flags
    absent = segment.not_issued(call.lane, call.epoch)
    if absent:
        return f"ranks {absent} have not issued this call"
    words = segment.read_flags(patience_s=5.0)
    if words is None or flags is None:
        return "not all ranks' GPUs have come" + (", though all have issued it" if absent is not None else "")
    # A call first waits until its slot's last data was read; from there on for the data of its peers.
    started = int(words[flags.stage_index(call.slot)]) == STARTED
    kind: Kind = "ready" if started else "done"
    verb = "have not published their data" if started else "have not read this rank's data"
    late = _late_in(words, segment, call.slot, kind)
    return f"ranks {late} {verb}" if late else "nobody is missing, this rank's GPU is busy with something else"


def _late_in(words: torch.Tensor, segment: DeviceSegment, slot: int, kind: Kind) -> list[int]:
    """Ranks whose word of this kind is not set."""
    flags = segment.flags
    if flags is None:
        return []
    peers = (peer for peer in range(len(segment.ranks)) if peer != segment.rank)
    return [segment.ranks[peer] for peer in peers if int(words[flags.index(kind, slot, peer)]) == 0]


def _end(segment: DeviceSegment, text: str) -> None:
    segment.fail(text)
    sys.stderr.write(f"[rank {segment.ranks[segment.rank]}] fsdp_symm watchdog: {text}\n")
    sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGABRT)


_watchdog = Watchdog()
atexit.register(_watchdog.stop)


def watch_captured(segment: DeviceSegment, slot: int, what: str) -> None:
    """Watch a call that is being captured into a CUDA graph of the user's."""
    _watchdog.add_captured(segment, slot, what)


def watch(call: Pending) -> None:
    """Watch a call until it has ended on the GPU."""
    _watchdog.add(call)
