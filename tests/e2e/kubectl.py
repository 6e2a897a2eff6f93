"""Queries of the end-to-end tests to a running cluster, by kubectl."""

import json
import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from carpool_e2e.cluster import Cluster, KubectlError, carpool_command

T = TypeVar("T")

_LOOK_EVERY_S = 0.2


def eventually(what: str, look: Callable[[], T | None], timeout_s: float = 60.0) -> T:
    """Look until there is something that is true, and return it.

    Raises:
        AssertionError: There was nothing in time; the message names the expected and the last value.
    """
    deadline = time.monotonic() + timeout_s
    while not (seen := look()):
        if time.monotonic() > deadline:
            raise AssertionError(f"expected {what} within {timeout_s:.0f} s, found {seen!r}")
        time.sleep(_LOOK_EVERY_S)
    return seen


@dataclass(frozen=True)
class Watcher:
    """Reads a cluster as its administrator."""

    cluster: Cluster

    def read(self, *arguments: str) -> Any:
        """Run `kubectl get … -o json`; None where there is no such object."""
        try:
            return json.loads(self.cluster.kubectl("get", *arguments, "-o", "json"))
        except KubectlError as error:
            if "not found" in str(error).casefold():
                return None
            raise

    def job(self, name: str) -> dict[str, Any]:
        """Read a job; empty where it is gone."""
        return self.read("gputrainingjob", name) or {}

    def state(self, name: str) -> str:
        """Return a job's state."""
        return str(self.job(name).get("status", {}).get("state", ""))

    def condition(self, name: str, type_: str) -> dict[str, Any]:
        """Return one condition of a job; empty where it has none of that type."""
        conditions = self.job(name).get("status", {}).get("conditions", [])
        return next((c for c in conditions if c["type"] == type_), {})

    def pods(self, job: str) -> list[dict[str, Any]]:
        """Return the pods of a job."""
        found: list[dict[str, Any]] = self.read("pods", "-l", f"carpool.dev/job={job}")["items"]
        return found

    def reservations(self) -> list[dict[str, Any]]:
        """Return all reservations of the cluster."""
        return [r for node in self.read("gpunodes")["items"] for r in node.get("spec", {}).get("reservations", [])]

    def reserved(self, job: str) -> list[dict[str, Any]]:
        """Return a job's reservations."""
        return [r for r in self.reservations() if r["jobName"] == job]

    def running(self, job: str, timeout_s: float = 60.0) -> dict[str, Any]:
        """Wait until a job runs, and return it."""
        eventually(f"job {job} Running", lambda: self.state(job) == "Running", timeout_s)
        return self.job(job)

    def gpus_in_container(self, pod: str) -> str:
        """Return the UUIDs that a running container was given."""
        return self.cluster.kubectl("exec", pod, "--", "/bin/sh", "-c", "echo $CARPOOL_VISIBLE_GPUS").strip()

    def placed_once(self, job: str, timeout_s: float = 60.0) -> None:
        """Assert that a job of one worker runs: one pod that has not ended, one reservation, that GPU inside.

        Ended pods of earlier attempts may be there: the kubelet refuses what comes before the agent has registered.
        """
        self.running(job, timeout_s)
        pods = [pod for pod in self.pods(job) if pod["status"]["phase"] not in ("Failed", "Succeeded")]
        held = self.reserved(job)
        assert len(pods) == 1, f"expected one pod of {job}, found {[p['metadata']['name'] for p in pods]}"
        assert len(held) == 1, f"expected one reservation of {job}, found {held}"
        assert held[0]["podUid"] == pods[0]["metadata"]["uid"]
        inside = self.gpus_in_container(pods[0]["metadata"]["name"])
        expected = ",".join(held[0]["gpuUuids"])
        assert inside == expected, f"expected {expected} in the container, found {inside}"

    def clear(self) -> None:
        """Delete all jobs and pods of the default namespace, and wait until no reservation is left."""
        self.cluster.kubectl("delete", "gputrainingjobs,pods", "--all", "--grace-period=1", timeout_s=120)
        eventually("no reservation left", lambda: not self.reservations())


def carpool(kubeconfig: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run the `carpool` command as a user of the cluster types it."""
    return subprocess.run(
        [carpool_command(), *arguments],
        env={**os.environ, "KUBECONFIG": str(kubeconfig)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
