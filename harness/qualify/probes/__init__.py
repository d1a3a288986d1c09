# SPDX-License-Identifier: Apache-2.0
"""Probes: each asks one booted engine and writes evidence. They never judge. `table.py` lists them.

Nothing is imported here, since the claims read the records of single probes.
"""
