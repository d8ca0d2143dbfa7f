"""One rank's shared-memory file: making it, mapping it, telling peers about it. The layout of a segment, in bytes::

0      failed   u32, then 64-byte cells: closed, and ready/done for each lane
1024   failure text: u32 length, then UTF-8
2048   signatures: 256 bytes a slot (u16 length, then text), the call that a rank published
C      data (C is the control size, a multiple of the page size)
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import select
import struct
from dataclasses import asdict, dataclass
from typing import Literal

import torch

from fsdp_symm.errors import SymmMemMemoryError, problem
from fsdp_symm.memory.signals import Word
from fsdp_symm.plan import LANES, Lane

SHM_DIR_VARIABLE = "FSDP_SYMM_SHM_DIR"
_CELL_BYTES = 64  # one cache line a word, so that ranks do not fight over one
_TEXT_AT, _TEXT_BYTES = 1024, 1000
_SIGNATURES_AT, _SIGNATURE_BYTES = 2048, 256

Kind = Literal["ready", "done"]


def shm_dir() -> str:
    """Where segments are made: ``/dev/shm`` unless ``FSDP_SYMM_SHM_DIR`` names another tmpfs."""
    return os.environ.get(SHM_DIR_VARIABLE) or "/dev/shm"


def another_place() -> str:
    """What to do where :func:`shm_dir` cannot hold a segment."""
    if os.environ.get(SHM_DIR_VARIABLE):
        return f"unset {SHM_DIR_VARIABLE}, or let it name a writable tmpfs"
    return f"mount a tmpfs there (`mount -t tmpfs tmpfs {shm_dir()}`), or let {SHM_DIR_VARIABLE} name one"


def unnamed_file(folder: str) -> int:
    """The descriptor of a new, empty file that goes with its last descriptor and mapping.

    Raises:
        OSError: the folder cannot hold one.
    """
    return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)


def control_bytes(num_slots: int) -> int:
    """Size of a segment's control part."""
    needed = _SIGNATURES_AT + _SIGNATURE_BYTES * num_slots
    return -(-needed // mmap.PAGESIZE) * mmap.PAGESIZE


def reserve(nbytes: int) -> int:
    """Make an unnamed file of ``nbytes`` with all its pages; returns the descriptor."""
    folder = shm_dir()
    what = f"host symmetric memory: {nbytes} bytes ({nbytes / 2**20:.1f} MiB) in {folder} could not be had"
    try:
        descriptor = unnamed_file(folder)
    except OSError as error:
        raise SymmMemMemoryError(
            problem(
                what,
                found=error.strerror,
                expected="a writable tmpfs",
                fix=another_place(),
            )
        ) from error
    try:
        _fill(descriptor, nbytes)
    except OSError as error:
        stat = os.statvfs(folder)
        raise SymmMemMemoryError(
            problem(
                what,
                found=f"{stat.f_bavail * stat.f_frsize} bytes free ({error.strerror})",
                expected=f"{nbytes} bytes free for this rank, and as much again for every other rank",
                fix=f"enlarge it (`mount -o remount,size=... {folder}`, `docker run --shm-size ...`), raise "
                f"min_bytes, or name fewer modules",
            )
        ) from error
    return descriptor


def _fill(descriptor: int, nbytes: int) -> None:
    """Give the file all its pages, or close it: also on Ctrl-C, since this may take long."""
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except BaseException:
        os.close(descriptor)
        raise


class Mapping:
    """One rank's segment in this process."""

    def __init__(self, descriptor: int, nbytes: int) -> None:
        self.map = mmap.mmap(descriptor, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self.failed = Word(self.map, 0)
        self.closed = Word(self.map, _CELL_BYTES)
        self._words = {
            (kind, lane): Word(self.map, _CELL_BYTES * (2 + 2 * index + offset))
            for index, lane in enumerate(LANES)
            for offset, kind in enumerate(("ready", "done"))
        }
        self.bytes = torch.frombuffer(self.map, dtype=torch.uint8)

    def word(self, kind: Kind, role: Lane) -> Word:
        return self._words[kind, role]

    def fail(self, text: str) -> None:
        data = text.encode()[:_TEXT_BYTES]
        self.map[_TEXT_AT : _TEXT_AT + 4 + len(data)] = struct.pack("<I", len(data)) + data
        self.failed.publish(1)
        for word in self._words.values():
            word.wake()
        self.closed.wake()

    def failure(self) -> str | None:
        if not self.failed.reached(1):
            return None
        (length,) = struct.unpack_from("<I", self.map, _TEXT_AT)
        return self.map[_TEXT_AT + 4 : _TEXT_AT + 4 + length].decode(errors="replace")

    def sign(self, index: int, text: str) -> None:
        data = fit(text)
        at = _SIGNATURES_AT + index * _SIGNATURE_BYTES
        self.map[at : at + 2 + len(data)] = struct.pack("<H", len(data)) + data

    def signature(self, index: int) -> str:
        at = _SIGNATURES_AT + index * _SIGNATURE_BYTES
        (length,) = struct.unpack_from("<H", self.map, at)
        return self.map[at + 2 : at + 2 + length].decode(errors="replace")


def fit(text: str) -> bytes:
    """The text, or its head and a digest of the whole where it is longer than a signature has room for."""
    data, room = text.encode(), _SIGNATURE_BYTES - 2
    if len(data) <= room:
        return data
    mark = f"...#{hashlib.sha256(data).hexdigest()[:16]}".encode()
    return data[: room - len(mark)].decode(errors="ignore").encode() + mark


@dataclass(frozen=True)
class Invitation:
    """What a rank tells its peers about its segment; ``inode`` proves that a descriptor is still the same file."""

    host: str
    pid: int
    descriptor: int
    inode: str
    nbytes: int
    error: str | None


def digest(invitations: list[Invitation]) -> str:
    """What all ranks have offered, in short."""
    return hashlib.sha256(repr(invitations).encode()).hexdigest()


@dataclass(frozen=True)
class Answer:
    """One rank's word while the ranks meet.

    Attributes:
        invitation: to its own segment.
        mapped: digest of the invitations that it has answered, empty at first.
        error: why one of them could not be mapped.
    """

    invitation: Invitation
    mapped: str
    error: str | None

    def dump(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def load(data: bytes) -> Answer:
        fields = json.loads(data)
        return Answer(Invitation(**fields.pop("invitation")), **fields)


def inode_of(descriptor: int) -> str:
    stat = os.fstat(descriptor)
    return f"{stat.st_dev}:{stat.st_ino}:{stat.st_size}"


def host_identity() -> str:
    """Kernel boot and PID namespace: ranks that share both can open each other's descriptors."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"


def is_dead(pidfd: int) -> bool:
    """A pidfd turns readable when its process ends, also while it is an unreaped zombie (pidfd_open(2))."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def close_all(descriptors: list[int | None]) -> None:
    """Close and take out all of them."""
    while descriptors:  # taken out first: a signal in between must not let one be closed twice
        descriptor = descriptors.pop()
        if descriptor is not None:
            os.close(descriptor)
