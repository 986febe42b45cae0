"""One table of settings, as a SLURM script or as a manifest for Kubeflow Trainer.

Both start the same torchrun on each node, which starts the ranks again when one of them or a node
was lost. Copy this file and change it: it needs nothing but PyYAML.

    python examples/clusters.py slurm --nodes 8 --script train.py > job.sh
    python examples/clusters.py kubernetes --nodes 8 --script /code/train.py > job.yaml
"""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass
from typing import Any

import yaml

API = "trainer.kubeflow.org"


@dataclass(frozen=True)
class Settings:
    """What a job needs, whoever starts it.

    Attributes:
        name: Of the job.
        script: What each rank runs, with its arguments.
        nodes: Machines.
        least_nodes: With how many the job goes on while others are missing; 0: with all only.
        devices: GPUs of a machine, one rank each.
        cpus: CPU cores of a machine.
        memory: Memory of a machine, in GiB.
        restarts: How often torchrun starts the ranks again before it gives up.
        hours: SLURM: the longest time.
        port: On which the nodes meet.
        image: Kubernetes: the container, with this package and the script.
        claim: Kubernetes: the volume that all nodes share, for checkpoints.
        runs: Where that volume is, in the container.
    """

    name: str = "distill"
    script: str = "train.py"
    nodes: int = 8
    least_nodes: int = 0
    devices: int = 8
    cpus: int = 64
    memory: int = 512
    restarts: int = 3
    hours: int = 24
    port: int = 29400
    image: str = "registry.example.com/distill:1"
    claim: str = "runs"
    runs: str = "/runs"


def torchrun(settings: Settings, job: str, endpoint: str) -> list[str]:
    """The command of each node, in words.

    Args:
        settings: The job's.
        job: What all nodes of one job call it, and no other job does.
        endpoint: The node where all of them meet; while it is gone, none goes on.
    """
    least = settings.least_nodes
    # Else a node that comes later waits for what torch 2.14 tells at the first meeting only.
    elastic = ["env", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"] if least else []
    return [
        *elastic,
        "torchrun",
        f"--nnodes={least}:{settings.nodes}" if least else f"--nnodes={settings.nodes}",
        f"--nproc-per-node={settings.devices}",
        f"--max-restarts={settings.restarts}",
        "--rdzv-backend=c10d",
        f"--rdzv-id={job}",
        f"--rdzv-endpoint={endpoint}:{settings.port}",
        *settings.script.split(),
    ]


def slurm(settings: Settings) -> str:
    """A script for ``sbatch``."""
    command = " ".join(torchrun(settings, '"$SLURM_JOB_ID"', '"$first"'))
    return f"""\
#!/bin/bash
#SBATCH --job-name={settings.name}
#SBATCH --nodes={settings.nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={settings.devices}
#SBATCH --cpus-per-task={settings.cpus}
#SBATCH --mem={settings.memory}G
#SBATCH --time={settings.hours}:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun {command}
"""


def kubernetes(settings: Settings) -> str:
    """A manifest for ``kubectl apply``: how pods of this kind are made, and the job."""
    resources = [_runtime(settings), _job(settings)]
    text: str = yaml.safe_dump_all(resources, sort_keys=False, width=100)
    return text


def _runtime(settings: Settings) -> dict[str, Any]:
    container = {
        "name": "node",
        "image": settings.image,
        "volumeMounts": [
            {"name": "runs", "mountPath": settings.runs},
            {"name": "memory", "mountPath": "/dev/shm"},  # noqa: S108 - what loaders' workers share
        ],
    }
    pod = {
        "restartPolicy": "OnFailure",
        "containers": [container],
        "volumes": [
            {"name": "runs", "persistentVolumeClaim": {"claimName": settings.claim}},
            {"name": "memory", "emptyDir": {"medium": "Memory"}},
        ],
    }
    node = {
        "name": "node",
        "template": {
            "metadata": {"labels": {f"{API}/trainjob-ancestor-step": "trainer"}},
            "spec": {"template": {"spec": pod}},
        },
    }
    return {
        "apiVersion": f"{API}/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": {
            "name": f"{settings.name}-nodes",
            "labels": {f"{API}/framework": "torch"},
        },
        "spec": {
            "mlPolicy": {"numNodes": settings.nodes, "torch": {}},
            "template": {
                "spec": {
                    "failurePolicy": {"maxRestarts": settings.restarts},
                    "replicatedJobs": [node],
                }
            },
        },
    }


def _job(settings: Settings) -> dict[str, Any]:
    amounts = {
        "cpu": settings.cpus,
        "memory": f"{settings.memory}Gi",
        "nvidia.com/gpu": settings.devices,
    }
    return {
        "apiVersion": f"{API}/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": settings.name},
        "spec": {
            "runtimeRef": {
                "apiGroup": API,
                "kind": "TrainingRuntime",
                "name": f"{settings.name}-nodes",
            },
            "trainer": {
                "numNodes": settings.nodes,
                "numProcPerNode": settings.devices,
                "image": settings.image,
                # Kubeflow Trainer names the first node in PET_MASTER_ADDR; Kubernetes puts it in.
                "command": torchrun(settings, settings.name, "$(PET_MASTER_ADDR)"),
                "resourcesPerNode": {"requests": dict(amounts), "limits": dict(amounts)},
            },
        },
    }


FORMS = {"slurm": slurm, "kubernetes": kubernetes}


def main() -> None:
    """Print a job in one of the forms."""
    parser = argparse.ArgumentParser(description="print a job for a cluster")
    parser.add_argument("form", choices=FORMS)
    for field in dataclasses.fields(Settings):
        name, default = field.name.replace("_", "-"), field.default
        parser.add_argument(f"--{name}", type=type(default), default=default)
    given = vars(parser.parse_args())
    print(FORMS[given.pop("form")](Settings(**given)), end="")


if __name__ == "__main__":
    main()
