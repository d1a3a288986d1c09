# SPDX-License-Identifier: Apache-2.0
"""What people see: live progress, the table of claims, the HTML report. Display only; nothing here is judged."""
