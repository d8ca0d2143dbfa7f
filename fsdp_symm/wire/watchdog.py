"""A host thread that notices when a call of our own wire does not end on the GPU, says who is missing, and ends the
process.

A stream that waits for a flag cannot time out, and a host that waits for that stream cannot raise; going on with
memory that nobody filled would train on garbage. So the process ends, as it does when NCCL's watchdog sees a stuck
collective: the text goes to stderr and to the peers of the same host, then SIGABRT, which torchrun reports.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, field

import torch

from fsdp_symm.errors import problem
from fsdp_symm.memory.device import DeviceSegment
from fsdp_symm.memory.stream_flags import STARTED

_POLL_S = 0.2
_DEAD_AFTER_S = 2.0  # a peer that has ended may have finished its part: only a call that stays stuck accuses it


@dataclass
class Pending:
    """A call that was enqueued.

    Attributes:
        segment, slot: whose flags it waits for.
        epoch, what: the call.
        event: its end on this rank's stream.
        since: ``time.monotonic()`` of its enqueueing, or of the end of the call before it, whichever is later.
    """

    segment: DeviceSegment
    slot: int
    epoch: int
    what: str
    event: torch.cuda.Event
    since: float = field(default_factory=time.monotonic)


class Watchdog:
    """One thread for all segments of a process; started by the first call."""

    def __init__(self) -> None:
        self._calls: deque[Pending] = deque()
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._process = 0

    def add(self, call: Pending) -> None:
        """Watch a call until its event is reached."""
        if self._process != os.getpid():  # first use, or a forked child, in which threads do not live on
            self._process = os.getpid()
            self._calls.clear()
            self._stop.clear()
            self._thread = threading.Thread(target=self._run, name="fsdp_symm_watchdog", daemon=True)
            self._thread.start()
        self._calls.append(call)
        self._wake.set()

    def stop(self) -> None:
        """End the thread. An interpreter that shuts down under a thread inside CUDA would abort."""
        self._stop.set()
        self._wake.set()
        if self._thread is not None and self._process == os.getpid():
            self._thread.join(timeout=10 * _POLL_S)

    def _run(self) -> None:
        while not self._stop.is_set():
            if not self._calls:
                self._wake.clear()
                if not self._calls:
                    self._wake.wait()
            self._drop_ended()
            if self._calls:
                call = self._calls[0]
                text = _verdict(call)
                if text is not None:
                    _end(call, text)
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
        return f"{call.what} (epoch {call.epoch}) is stuck: {reported}"
    if age_s > _DEAD_AFTER_S and segment.notices is not None and (dead := segment.notices.dead_ranks()):
        return problem(
            f"{call.what}, epoch {call.epoch}: ranks {dead} of group {list(segment.ranks)} are gone",
            found="their processes have ended while this rank's GPU waits for them",
            expected="every rank to reach this call",
            fix="look at the first error those ranks printed, or at the kernel's log for an out-of-memory kill",
        )
    if age_s <= segment.timeout_s:
        return None
    return problem(
        f"{call.what}, epoch {call.epoch}: {_late(call)} of group {list(segment.ranks)}",
        found=f"not ended on this rank's GPU within {segment.timeout_s:g} s",
        expected="every rank to reach this call",
        fix="look at what those ranks are doing (py-spy dump); raise timeout_s if they are merely slow",
    )


def _late(call: Pending) -> str:
    """Which ranks have not signalled, read from the flags on the device."""
    segment, flags = call.segment, call.segment.flags
    words = segment.read_flags(patience_s=5.0)
    if words is None or flags is None:
        return "some ranks, which the GPU does not tell, have not come,"
    # A call first waits until its slot's last data was read; from there on for the data of its peers.
    started = int(words[flags.stage_index(call.slot)]) == STARTED
    kind, verb = ("ready", "have not published their data") if started else ("done", "have not read this rank's data")
    late = [
        segment.ranks[peer]
        for peer in range(len(segment.ranks))
        if peer != segment.rank and int(words[flags.index(kind, call.slot, peer)]) == 0
    ]
    return f"ranks {late} {verb}" if late else "this rank's GPU is busy with something else;"


def _end(call: Pending, text: str) -> None:
    call.segment.fail(text)
    sys.stderr.write(f"[rank {call.segment.ranks[call.segment.rank]}] fsdp_symm watchdog: {text}\n")
    sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGABRT)


_watchdog = Watchdog()
atexit.register(_watchdog.stop)


def watch(call: Pending) -> None:
    """Watch a call until it has ended on the GPU."""
    _watchdog.add(call)
