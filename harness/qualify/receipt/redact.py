# SPDX-License-Identifier: Apache-2.0
"""Private data in evidence: replaced by placeholders before anything is judged, searched for again in every review.

One table of rules serves both sides, so a folder that was scrubbed is always found clean. The writer adds literals
that only it knows: the host's name, its addresses, and the folders of this run.
"""

from __future__ import annotations

import getpass
import os
import re
import socket
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import psutil

from qualify.evidence import Evidence, EvidenceWriter, MappingSource, compress
from qualify.model import Record

REDACTION = "redaction.json"


MAX_PASSES = 20


class Redaction(Record):
    """evidence/redaction.json: how many places were replaced by each placeholder."""

    replaced: dict[str, int]


class Rule(NamedTuple):
    """What must not be in evidence. `keep` groups of the pattern, if any, survive the replacement."""

    name: str
    pattern: re.Pattern[bytes]


_BEFORE = rb"(?<![\w.%-])"
_AFTER = rb"(?![\w-])"
_OCTET = rb"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"

RULES = (
    Rule("secret", re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.S)),
    # Shapes of well-known services: Hugging Face, OpenAI and alike, GitHub, AWS, JSON web tokens.
    Rule(
        "secret",
        re.compile(rb"\b(?:hf_\w{20,}|sk-[\w-]{20,}|gh[opsur]_\w{30,}|AKIA[0-9A-Z]{16}|eyJ[\w-]{10,4000}\.eyJ[\w.-]+)"),
    ),
    Rule("secret", re.compile(rb"(?P<keep>\b[Bb]earer\s+)[\w.~+/-]{16,}=*")),
    Rule(
        "secret",
        re.compile(
            rb"(?P<keep>(?i:api[_-]key|hf[_-]token|(?:access|auth)[_-]token|client[_-]secret|passw(?:or)?d)"
            rb"[\"']?(?:\s*[:=,]\s*|\s+)[\"']?)(?!None\b|null\b|True\b|False\b)[\w.~+/-]{8,}=*"
        ),
    ),
    Rule("home", re.compile(_BEFORE + rb"/(?:home/[\w.-]+|Users/[\w.-]+|root)" + _AFTER)),
    # Not loopback, not "any", and not a version number with four parts.
    Rule(
        "address",
        re.compile(
            rb"(?<![\w.+~%-])(?<!==)(?<!\"version\": \")(?<!\"version\":\")(?!127\.|0\.0\.0\.0|255\.)"
            + rb"\.".join([_OCTET] * 4)
            + rb"(?![\w+-]|\.\w)"
        ),
    ),
    Rule("address", re.compile(rb"(?<![\w:])(?i:fe80|f[cd][0-9a-f]{2}):[0-9a-fA-F:]*:[0-9a-fA-F]+")),
    Rule("host", re.compile(_BEFORE + rb"\w[\w-]*(?:\.[\w-]+)*\.(?:internal|lan|corp|localdomain)\b(?!\.)")),
)


def local_rules(folders: dict[str, Path]) -> tuple[Rule, ...]:
    """What only this machine knows: the given folders by placeholder, the home, this host's name and addresses."""
    paths = {**folders, "python": Path(sys.prefix), "home": Path(os.path.expanduser("~"))}  # noqa: PTH111
    # The longest first, so that a folder inside another keeps its own placeholder.
    by_length = sorted(paths.items(), key=lambda pair: len(str(pair[1])), reverse=True)
    rules = [Rule(name, _folder(path)) for name, path in by_length if len(path.parts) > 1]
    rules += [Rule("address", _word(address)) for address in _addresses()]
    names = {socket.gethostname(), os.environ.get("HOSTNAME", "")}
    rules += [Rule("host", _word(name)) for name in sorted(names) if _identifies(name)]
    if user := _user():
        rules.append(Rule("user", re.compile(rb"(?<=torchinductor_)" + re.escape(user.encode()) + rb"\b")))
    return tuple(rules)


def _folder(path: Path) -> re.Pattern[bytes]:
    """A deep path is its own wherever it stands (-I/a/b); a short one such as /root may end another path."""
    before = rb"" if len(path.parts) > 2 else _BEFORE
    return re.compile(before + re.escape(str(path).encode()) + _AFTER)


def _word(text: str) -> re.Pattern[bytes]:
    return re.compile(rb"(?<![\w.-])" + re.escape(text.encode()) + _AFTER)


def _user() -> str | None:
    """None for a user id without a name, as containers have."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return None


def _addresses() -> list[str]:
    """The addresses of this host that are not loopback, as texts in logs spell them."""
    found = {
        address.address.split("%")[0]
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family in (socket.AF_INET, socket.AF_INET6)
    }
    return sorted(address for address in found if not address.startswith("127.") and address != "::1")


def _identifies(name: str) -> bool:
    """A short plain word may be a key of the evidence and tells nobody anything; a composed or long name does."""
    return name != "localhost" and (len(name) > 8 or bool(re.search(r"[\d.-]", name))) and len(name) > 2


def scrub(content: bytes, rules: Iterable[Rule]) -> tuple[bytes, Counter[str]]:
    """The content with every match of `rules` and RULES replaced by <name>, and how often each name was put in."""
    replaced: Counter[str] = Counter()
    # A replacement may uncover another match beside it, so go on until nothing changes.
    for _ in range(MAX_PASSES):
        before = content
        for rule in (*rules, *RULES):
            placeholder = f"<{rule.name}>".encode()
            keeps = "keep" in rule.pattern.groupindex
            content, count = rule.pattern.subn((rb"\g<keep>" if keeps else b"") + placeholder, content)
            replaced[rule.name] += count
        if content == before:
            break
    return content, +replaced


def scrub_folder(evidence: Path, folders: dict[str, Path]) -> Redaction:
    """Scrub every text file below the evidence folder in place, and write down how much was replaced.

    Done before anything is judged, so that claims are derived from exactly what others will read.
    """
    rules = local_rules(folders)
    replaced: Counter[str] = Counter()
    writer = EvidenceWriter(evidence)
    for path in sorted(path for path in evidence.rglob("*") if path.is_file() and not path.is_symlink()):
        name = path.relative_to(evidence).as_posix()
        before = _plain(path.read_bytes(), name)
        if not _is_text(before):
            continue
        after, counts = scrub(before, rules)
        if after != before:
            writer.bytes(name, compress(after) if name.endswith(".gz") else after)
            replaced += counts
    redaction = Redaction(replaced=dict(sorted(replaced.items())))
    writer.record(REDACTION, redaction)
    return redaction


def scan(path: str, content: bytes) -> str | None:
    """The first private datum in a file, in one line that does not repeat it; None if there is none."""
    plain = _plain(content, path)
    if not _is_text(plain):
        return None
    for rule in RULES:
        if found := rule.pattern.search(plain):
            line = plain.count(b"\n", 0, found.start()) + 1
            return f"{path}, line {line}: looks like private data ({rule.name})"
    return None


def _plain(content: bytes, path: str) -> bytes:
    """The content, expanded if its name says that it is compressed."""
    return Evidence(MappingSource({path: content})).bytes(path)


def _is_text(content: bytes) -> bool:
    return b"\0" not in content
