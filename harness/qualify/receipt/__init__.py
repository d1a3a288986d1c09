# SPDX-License-Identifier: Apache-2.0
"""Receipts: the typed statement, its canonical bytes and manifest, how it is built, reviewed and compared."""
