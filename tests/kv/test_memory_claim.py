# SPDX-License-Identifier: Apache-2.0
"""memory.admission: the admitted KV cache agrees between log, metrics and ranks; each fault has its code.

Growth and figures of a device are in tests/claims_device.
"""

from __future__ import annotations

import json

import kv_synthetic as synthetic
import pytest
from qualify.claims import memory
from qualify.claims.model import Status, worst
from qualify.evidence import Evidence, MappingSource, MissingEvidence

PROFILE = synthetic.profile()
TOKENS, CONCURRENCY, BLOCKS = 860_370, 210.05128205128204, 8192


def worker(rank):
    cache = {
        "blocks": BLOCKS,
        "bytes": 1 << 30,
        "tokens": TOKENS,
        "concurrency": CONCURRENCY,
        "maxModelLen": 4096,
        "dtype": "auto",
        "utilization": 0.9,
        "tensors": [],
        "unknown": {},
    }
    names = ("localRank", "worldSize", "tensorParallel", "process", "device", "versions", "runner", "modelClass")
    return {"rank": rank, "kvCache": cache, **dict.fromkeys((*names, "plugin")), "unknown": {}}


def log_line(tokens="860,370", length="4,096", times="210.05"):
    start = "(EngineCore pid=7) INFO 11-30 05:40:04 [kv_cache_utils.py:2327] "
    rest = f"CPU KV cache size: {tokens} tokens, Maximum concurrency for {length} tokens per request: {times}x\n"
    return start + rest


def info(**labels):
    values = {
        "num_gpu_blocks": BLOCKS,
        "kv_cache_size_tokens": TOKENS,
        "kv_cache_max_concurrency": CONCURRENCY,
        **labels,
    }
    inner = ",".join(f'{key}="{value}"' for key, value in values.items() if value is not None)
    return f"vllm:cache_config_info{{{inner}}} 1.0\n"


def clean():
    """Files of every boot of the profile, by path."""
    files = {}
    for number, boot in enumerate(PROFILE.boots, 1):
        folder = f"boots/{number:02d}-{boot.name}"
        files[f"{folder}/workers.json"] = [worker(0), worker(1)]
        files[f"{folder}/admission.prom"] = info()
        files[f"{folder}/engine.log"] = log_line()
    return files


def judged(files, profile=PROFILE):
    content = {p: (v if isinstance(v, str) else json.dumps(v)).encode() for p, v in files.items()}
    judgement = memory.judge(Evidence(MappingSource(content)), profile)
    status = worst(item.status for item in judgement.checks)
    return {str(item.reason_code) for item in judgement.checks if item.reason_code}, status, judgement


COLD = "boots/02-cold"


def test_agreement_passes_and_growth_is_not_claimed_on_cpu():
    """All sources agree: passed. On CPU growth is null with a reason and no check pretends to have measured it."""
    codes, status, judgement = judged(clean())
    assert (codes, status) == (set(), Status.PASSED)
    assert judgement.observed["growthUnderLoad"]["value"] is None
    assert not any("load" in item.name for item in judgement.checks)


@pytest.mark.parametrize(
    ("path", "value", "code", "status"),
    [
        ("engine.log", log_line(tokens="860,371"), "admission_disagrees", Status.FAILED),
        ("engine.log", log_line(times="211.05"), "admission_disagrees", Status.FAILED),
        ("engine.log", log_line(length="8,192"), "admission_disagrees", Status.FAILED),
        ("engine.log", "nothing here\n", "admission_missing", Status.INCONCLUSIVE),
        ("admission.prom", info(kv_cache_size_tokens=1), "admission_disagrees", Status.FAILED),
        ("admission.prom", info(num_gpu_blocks=1), "admission_disagrees", Status.FAILED),
        ("admission.prom", info(kv_cache_size_tokens="None"), "admission_missing", Status.INCONCLUSIVE),
        ("admission.prom", "", "admission_missing", Status.INCONCLUSIVE),
        ("workers.json", [worker(0)], "rank_missing", Status.FAILED),
    ],
)
def test_each_source_matters(path, value, code, status):
    """One source that disagrees or is silent is named and keeps the claim from passing."""
    files = clean()
    files[f"{COLD}/{path}"] = value
    codes, found, _ = judged(files)
    assert (codes, found) == ({code}, status)


@pytest.mark.parametrize("name", ["blocks", "bytes", "tokens", "concurrency"])
def test_ranks_must_agree(name):
    """Every figure is the same on all ranks."""
    files = clean()
    files[f"{COLD}/workers.json"][1]["kvCache"][name] += 1
    codes, status, _ = judged(files)
    assert "ranks_disagree" in codes
    assert status is Status.FAILED


def test_floor():
    """Fewer tokens than the profile demands fail, however well the sources agree."""
    section = PROFILE.memory.model_copy(update={"min_kv_tokens": TOKENS + 1})
    assert judged(clean(), PROFILE.model_copy(update={"memory": section}))[:2] == (
        {"kv_below_floor"},
        Status.FAILED,
    )


def test_unknown_kv_cache_never_passes():
    """Workers that could not read their cache leave the claim open."""
    files = clean()
    for one in files[f"{COLD}/workers.json"]:
        one["kvCache"] = None
    codes, status, _ = judged(files)
    assert (codes, status) == ({"admission_missing"}, Status.INCONCLUSIVE)


def test_a_missing_boot_is_missing_evidence():
    """Each boot of the profile must have left its workers' reports."""
    files = clean()
    del files[f"{COLD}/workers.json"]
    with pytest.raises(MissingEvidence):
        judged(files)
