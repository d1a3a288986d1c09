# SPDX-License-Identifier: Apache-2.0
"""What runs inside the engine's workers: observation only, except for poison and faults that a probe asks for.

Loaded in the engine's own environment (Python 3.10 or later, torch, vLLM); it imports nothing of the host side.
"""
