# SPDX-License-Identifier: Apache-2.0
"""Qualification harness for LLM serving images.

This module stays free of imports: `qualify.inside` is loaded in the engine's own environment.
"""

__version__ = "0.1.0"
