# SPDX-License-Identifier: Apache-2.0
"""A stand-in for a vLLM server, with faults: OpenAI endpoints, metrics under vLLM's names, development endpoints.

    with FakeEngine(drafter=3, faults=Faults(cut_stream=2)) as engine:
        httpx.post(f"{engine.url}/v1/completions", json=...)

Tokens depend on prompt, seed and position only. All requests share one step loop, so that steps, drafts and tokens
obey the identities of the real engine until a fault breaks one.
"""

from fake_engine.engine import Faults
from fake_engine.server import FakeEngine

__all__ = ["FakeEngine", "Faults"]
