# SPDX-License-Identifier: Apache-2.0
"""Limitations, and what a receipt must not be quoted for: computed from the facts of the run.

No verdict depends on these texts: dropping one must never make a receipt look better to a machine.
"""

from __future__ import annotations

from collections.abc import Iterator

from qualify.claims.boots import ENOUGH_BOOTS, equal_boots
from qualify.claims.model import Claim, ClaimId, Status
from qualify.profiles import Probe, Profile
from qualify.receipt.model import Caveat, Identity
from qualify.records import BootRecord, ModelFiles, Outcome, Run

SPEED = (ClaimId.THROUGHPUT_SUSTAINED,)


def limitations(
    profile: Profile, run: Run, identity: Identity, boots: tuple[BootRecord, ...], claims: tuple[Claim, ...]
) -> tuple[Caveat, ...]:
    """What the evidence does not cover."""
    return tuple(_limitations(profile, run, identity, boots, claims))


def _limitations(
    profile: Profile, run: Run, identity: Identity, boots: tuple[BootRecord, ...], claims: tuple[Claim, ...]
) -> Iterator[Caveat]:
    if run.outcome is not Outcome.COMPLETED:
        yield Caveat(
            id="run.partial", text=f"the run was {run.outcome}; its evidence is partial", affects=tuple(ClaimId)
        )
    if identity is Identity.UNVERIFIED:
        yield Caveat(
            id="engine.unverified",
            text="nothing of the server's software could be seen; the subject is the profile",
            affects=tuple(ClaimId),
        )
    unshown = tuple(claim.id for claim in claims if claim.status in (Status.NOT_RUN, Status.SKIPPED))
    if unshown:
        yield Caveat(id="claims.notShown", text="this run shows nothing about these claims", affects=unshown)
    if any(_has_development_endpoints(boot) for boot in boots):
        yield Caveat(
            id="server.developmentEndpoints",
            text="the server ran with the engine's development endpoints, which a production server must not offer",
            affects=(ClaimId.SERVE_TP, ClaimId.KV_RESTORE),
        )
    measured = [boot for boot in profile.boots if Probe.THROUGHPUT in boot.probes]
    groups = equal_boots(measured)
    few = [equal for equal in groups if len(equal) < ENOUGH_BOOTS]
    if few:
        names = ", ".join(boot.name for equal in few for boot in equal)
        once = len(groups) == len(measured)
        what = "each configuration was booted once" if once else f"{names}: fewer than {ENOUGH_BOOTS} equal boots"
        yield Caveat(
            id="throughput.singleBoot",
            text=f"{what}; the intervals hold within a boot, not between boots",
            affects=SPEED,
        )


def _has_development_endpoints(boot: BootRecord) -> bool:
    return any(process.environment.get("VLLM_SERVER_DEV_MODE") == "1" for process in boot.processes)


def not_for(profile: Profile, model: ModelFiles | None) -> tuple[Caveat, ...]:
    """Uses that the receipt must not be quoted for."""
    return tuple(_not_for(profile, model))


def _not_for(profile: Profile, model: ModelFiles | None) -> Iterator[Caveat]:
    if profile.engine.kind == "cpu":
        yield Caveat(
            id="gpu.figures",
            text="speed and memory were measured on a CPU engine and say nothing about any GPU",
            affects=(ClaimId.MEMORY_ADMISSION, *SPEED),
        )
    if model is None or model.recipe is None:
        return
    yield Caveat(
        id="model.quality",
        text=f"the weights are synthetic (recipe {model.recipe}), so nothing is said about the quality of answers",
        affects=(ClaimId.SERVE_TP,),
    )
    if any(boot.speculation and Probe.THROUGHPUT in boot.probes for boot in profile.boots):
        yield Caveat(
            id="model.acceptance",
            text="acceptance length with synthetic weights is not that of a real checkpoint",
            affects=SPEED,
        )
