# SPDX-License-Identifier: Apache-2.0
"""Exit codes and the exceptions that lead to them.

ExitCode                     raised as
├─ 0 PASSED
├─ 1 FAILED                  (a verdict, not an exception)
├─ 2 USAGE                   UsageError
├─ 3 NOT_USABLE              (a verdict, not an exception)
├─ 4 REFUSED                 PreflightError
├─ 5 BROKEN                  TargetError, EvidenceError, any other QualifyError
├─ 20 + N                    the failing step N of `review`
└─ 130 INTERRUPTED           Interrupted
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    PASSED = 0
    FAILED = 1
    USAGE = 2
    NOT_USABLE = 3
    REFUSED = 4
    BROKEN = 5
    REVIEW_BASE = 20
    INTERRUPTED = 130


class QualifyError(Exception):
    """A failure that the user can act on: what happened, and what to do about it."""

    exit_code: ExitCode = ExitCode.BROKEN

    def __init__(self, what: str, *, remedy: str = "", tail: tuple[str, ...] = ()) -> None:
        super().__init__(what)
        self.what = what
        self.remedy = remedy
        self.tail = tail
        """The last lines of the process that failed, verbatim."""

    def __str__(self) -> str:
        return f"{self.what}: {self.remedy}" if self.remedy else self.what


class UsageError(QualifyError):
    """The command line, a profile or an input file is wrong."""

    exit_code = ExitCode.USAGE


class PreflightError(QualifyError):
    """This host cannot run what was asked for; nothing was started."""

    exit_code = ExitCode.REFUSED


class TargetError(QualifyError):
    """The engine or the cache server refused, died, hung or answered wrongly."""

    def __init__(self, what: str, *, phase: str, remedy: str = "", tail: tuple[str, ...] = ()) -> None:
        super().__init__(what, remedy=remedy, tail=tail)
        self.phase = phase


class EvidenceError(QualifyError):
    """Evidence is missing, unreadable or not of the expected form."""


class Interrupted(QualifyError):
    """Stopped by the user (Ctrl-C, SIGTERM)."""

    exit_code = ExitCode.INTERRUPTED
