# SPDX-License-Identifier: Apache-2.0
"""Claims: one file each, evidence and profile in, judgement out. `derive.py` runs them all.

Nothing is imported here: profiles know the claims by name, and claims know profiles.
"""
