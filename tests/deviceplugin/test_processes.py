"""From process IDs to pods."""

from pathlib import Path

import pytest
from carpool_deviceplugin.devices.processes import ProcTree, pod_of
from hypothesis import given
from hypothesis import strategies as st

UID = "8f2c1b7e-0d3a-4c5b-9e6f-1a2b3c4d5e6f"


@pytest.mark.parametrize(
    ("line", "uid"),
    [
        (f"0::/kubepods.slice/a.slice/kubepods-burstable-pod{UID.replace('-', '_')}.slice/cri-1.scope", UID),
        (f"0::/kubepods/besteffort/pod{UID}/4f5e", UID),
        (f"0::/kubepods/pod{UID}", UID),
        (f"0::/../../kubepods-pod{UID.replace('-', '_')}.slice/cri-containerd-4f5e.scope", UID),
        (f"11:memory:/kubepods/burstable/pod{UID}/4f5e\n1:name=systemd:/kubepods/burstable/pod{UID}/4f5e", UID),
        (f"0::/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{UID.replace('-', '_')}.slice/x", UID),
        ("0::/kubepods/burstable/pod0123456789abcdef0123456789abcdef/x", "0123456789abcdef0123456789abcdef"),
        ("0::/system.slice/docker-4f5e.scope", None),
        ("0::/user.slice/podman-4f5e.scope", None),
        ("0::/", None),
        ("", None),
    ],
)  # fmt: skip
def test_cgroups_of_kubelets(line: str, uid: str | None) -> None:
    assert pod_of(line) == uid


@given(st.text())
def test_anything_else_is_no_pod_or_a_uid(text: str) -> None:
    found = pod_of(text)
    assert found is None or set(found) <= set("0123456789abcdef-")


def test_command_that_looks_like_fields(tmp_path: Path) -> None:
    (tmp_path / "42").mkdir()
    (tmp_path / "42" / "cgroup").write_text("0::/\n")
    (tmp_path / "42" / "stat").write_text("42 (a) R 1 2) () S " + " ".join(["0"] * 18) + " 4200 0\n")
    found = ProcTree(tmp_path).find(42)
    assert (found.started, found.name, found.key) == (4200, "a) R 1 2) (", "42-4200")


def test_user_of_a_process(tmp_path: Path) -> None:
    (tmp_path / "42").mkdir()
    (tmp_path / "42" / "status").write_text("Name:\tUid: 7\nUid:\t1000\t0\t0\t0\nGid:\t5\t5\t5\t5\n")
    (tmp_path / "43").mkdir()
    (tmp_path / "43" / "status").write_text("Name:\tx\n")
    assert [ProcTree(tmp_path).user(pid) for pid in (42, 43, 44)] == [1000, None, None]


@pytest.mark.parametrize("stat", ["", "42 (x) S", "42 (x) S " + "y " * 30])
def test_unreadable_process_is_unknown(tmp_path: Path, stat: str) -> None:
    (tmp_path / "42").mkdir()
    (tmp_path / "42" / "cgroup").write_text("0::/\n")
    (tmp_path / "42" / "stat").write_text(stat)
    assert ProcTree(tmp_path).find(42) is None
    assert ProcTree(tmp_path).find(43) is None
