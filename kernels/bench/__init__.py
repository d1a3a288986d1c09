# SPDX-License-Identifier: Apache-2.0
"""Times the operators against the stock ones: run `python -m bench` in kernels/."""
