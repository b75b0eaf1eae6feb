"""What the tests of doctor's checks share: a site with risks, a sound one, and the one finding of a check."""

from __future__ import annotations

from typing import Any, Final

from slurm_pfi.cli.checks.finding import Finding

# A site with five settings that change what may be assumed.
RISKY_SLURM: Final = """\
ClusterName=lab
SlurmctldHost=head
PrologFlags=Serial
Prolog=/etc/slurm/prolog.d/*
GresTypes=gpu,mps,shard
AccountingStorageTRES=license/matlab   # gres/gpu is missing
NodeName=a[01-16] CPUs=128 Gres=gpu:big:8 State=UNKNOWN
NodeName=b[01-02] CPUs=64 \\
    Gres=gpu:big_1g.10gb:14,gpu:big:1
NodeName=c[1-4] CPUs=64 Gres=gpu:mid:4,shard:mid:32
PartitionName=gpu Nodes=ALL Default=YES
Include /etc/slurm/more.conf
"""
RISKY_GRES: Final = """\
NodeName=a[01-16] Name=gpu Type=big File=/dev/nvidia[0-7] Cores=0-63
NodeName=b[01-02] AutoDetect=nvml
NodeName=c[1-4] Name=gpu Type=mid File=/dev/nvidia0
NodeName=c[1-4] Name=gpu Type=mid File=/dev/nvidia2
NodeName=c[1-4] Name=gpu Type=mid File=/dev/nvidia[1,3]
NodeName=c[1-4] Name=shard Count=32
"""
SOUND_SLURM: Final = """\
PrologFlags=Contain,X11
GresTypes=gpu
AccountingStorageTRES=gres/gpu,license/x
NodeName=a[01-16] Gres=gpu:8
"""
SOUND_GRES: Final = "NodeName=a[01-16] Name=gpu File=/dev/nvidia[0-7]\n"


def only(findings: Any) -> Finding:
    listed = list(findings)
    assert len(listed) == 1, listed
    finding = listed[0]
    assert isinstance(finding, Finding)
    if finding.outcome == "fail":
        assert finding.todo, "a failure says what to do"
    return finding
