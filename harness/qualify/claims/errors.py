# SPDX-License-Identifier: Apache-2.0
from qualify.claims.model import Judgement
from qualify.evidence import Evidence
from qualify.profiles import Profile


def judge(evidence: Evidence, profile: Profile) -> Judgement:
    raise NotImplementedError
