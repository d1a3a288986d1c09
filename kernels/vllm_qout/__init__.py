# SPDX-License-Identifier: Apache-2.0
"""Caller-owned output for the DeepSeek-V4 query-norm + RoPE + KV-insert operator of vLLM.

Importing this package loads nothing: `vllm_qout.ops` loads the operators.
"""

__version__ = "0.1.0"
