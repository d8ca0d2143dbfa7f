"""``fsdp-symm doctor``: what this machine and its process groups can do for symmetric memory, and why not more."""

from __future__ import annotations

from fsdp_symm.doctor.command import configure, run
from fsdp_symm.doctor.report import SCHEMA_VERSION, DoctorReport

__all__ = ["SCHEMA_VERSION", "DoctorReport", "configure", "run"]
