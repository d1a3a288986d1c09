# SPDX-License-Identifier: Apache-2.0
"""Readers of engine evidence: logs, metrics, capture sets. They read and explain; claims judge."""
