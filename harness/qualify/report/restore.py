# SPDX-License-Identifier: Apache-2.0
"""The restore arms of kv.restore: tokens that the cache supplied against those predicted, and what was compared."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from qualify.claims.model import ClaimId
from qualify.receipt.model import Qualification
from qualify.report.bars import bar, bars
from qualify.report.markup import Markup, element, table

Row = dict[str, Any]


def restore_arms(predicate: Qualification) -> Markup | None:
    """A bar for each restore, its numbers, and the bytes by rank and KV-cache group; None without any restore."""
    claim = next(claim for claim in predicate.claims if claim.id is ClaimId.KV_RESTORE)
    rows: list[Row] = (claim.observed or {}).get("restores") or []
    if not rows:
        return None
    predicted: dict[str, int] = (claim.expected or {}).get("externalTokens") or {}
    longest = max([1, *predicted.values(), *(row["externalTokens"] or 0 for row in rows)])
    return element(
        "div",
        element("p", "Tokens that the cache supplied; the mark is the number predicted.", class_="soft"),
        bars(_bar(row, predicted.get(str(row["promptTokens"])), longest) for row in rows),
        element("h3", "Restores"),
        table(
            ("arm", "prompt tokens", "external tokens", "predicted", "blocks", "bytes", "mismatches", "time, cold"),
            [_numbers(row, predicted) for row in rows],
        ),
        element("h3", "By rank and KV-cache group, all restores"),
        table(
            ("rank", "group", "kind", "window", "tokens per block", "blocks", "bytes", "mismatches"),
            list(_by_group(rows)),
        ),
    )


def _bar(row: Row, predicted: int | None, longest: int) -> Markup:
    tokens = row["externalTokens"]
    return bar(
        f"{row['arm']}, {row['promptTokens']} tokens",
        _known(tokens),
        share=(tokens or 0) / longest,
        mark=None if predicted is None else predicted / longest,
        good=tokens == predicted and not row["mismatches"],
    )


def _numbers(row: Row, predicted: dict[str, int]) -> list[Any]:
    return [
        row["arm"],
        row["promptTokens"],
        _known(row["externalTokens"]),
        _known(predicted.get(str(row["promptTokens"]))),
        sum(group["blocks"] for group in row["groups"]),
        f"{row['bytes']:,}",
        row["mismatches"],
        f"{_seconds(row['seconds'])}, {_seconds(row['coldSeconds'])}",
    ]


def _by_group(rows: list[Row]) -> Iterator[list[Any]]:
    """Sums over all restores; what differs between them is listed."""
    groups: dict[tuple[int, int], list[Row]] = {}
    for row in rows:
        for group in row["groups"]:
            groups.setdefault((group["rank"], group["group"]), []).append(group)
    for (rank, number), found in sorted(groups.items()):
        yield [
            rank,
            number,
            ", ".join(sorted({spec for group in found for spec in group["specs"]})),
            ", ".join(sorted({str(group["window"]) for group in found if group["window"] is not None})),
            ", ".join(sorted({str(group["tokensPerBlock"]) for group in found})),
            sum(group["blocks"] for group in found),
            f"{sum(group['bytes'] for group in found):,}",
            sum(group["mismatches"] for group in found),
        ]


def _known(value: int | None) -> str:
    return "unknown" if value is None else str(value)


def _seconds(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3f} s"
