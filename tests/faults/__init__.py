# SPDX-License-Identifier: Apache-2.0
"""Faults: each breaks one thing, and the harness must refuse to pass it for exactly the documented reason.

python -m tests.faults [--seed N] [--engine] [--mutations N]
"""
