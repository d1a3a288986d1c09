# SPDX-License-Identifier: Apache-2.0
"""The load client: asks an engine, keeps what it answered and when. It measures and never judges."""
