# SPDX-License-Identifier: Apache-2.0
from qualify.cli import main

main()
