"""The kubelet's messages: generated from what is written here, with the kubelet's numbers."""

import subprocess
import sys
from pathlib import Path

import pytest
from carpool_deviceplugin.kubelet.protos import deviceplugin_pb2, podresources_pb2
from google.protobuf import descriptor_pb2

FOLDER = Path(__file__).parents[2] / "deviceplugin"
LABELS = {1: "", 3: "repeated "}


def test_generated_messages_are_those_of_the_protos(tmp_path: Path) -> None:
    subprocess.run([str(FOLDER / "protos.sh"), sys.executable, str(tmp_path)], check=True)
    generated = sorted((tmp_path / "carpool_deviceplugin" / "kubelet" / "protos").iterdir())
    assert len(generated) == 4
    for path in generated:
        committed = FOLDER / "carpool_deviceplugin" / "kubelet" / "protos" / path.name

        def meaning(text: str) -> list[str]:
            return [
                line for line in text.splitlines() if "Protobuf Python Version" not in line and not _is_version(line)
            ]

        assert meaning(path.read_text()) == meaning(committed.read_text()), "run deviceplugin/protos.sh"


def _is_version(line: str) -> bool:
    """The version of the generator stands in the file as three numbers on lines of their own."""
    return line.strip().rstrip(",").isdecimal()


@pytest.mark.parametrize(
    ("module", "message", "fields"),
    [
        (deviceplugin_pb2, "RegisterRequest", "1 version, 2 endpoint, 3 resource_name, 4 options"),
        (deviceplugin_pb2, "DevicePluginOptions", "1 pre_start_required, 2 get_preferred_allocation_available"),
        (deviceplugin_pb2, "ListAndWatchResponse", "1 repeated devices"),
        (deviceplugin_pb2, "Device", "1 ID, 2 health"),
        (deviceplugin_pb2, "AllocateRequest", "1 repeated container_requests"),
        (deviceplugin_pb2, "ContainerAllocateRequest", "1 repeated devices_ids"),
        (deviceplugin_pb2, "AllocateResponse", "1 repeated container_responses"),
        (deviceplugin_pb2, "ContainerAllocateResponse", "5 repeated cdi_devices"),
        (deviceplugin_pb2, "CDIDevice", "1 name"),
        (deviceplugin_pb2, "PreStartContainerRequest", "1 repeated devices_ids"),
        (podresources_pb2, "ListPodResourcesResponse", "1 repeated pod_resources"),
        (podresources_pb2, "PodResources", "1 name, 2 namespace, 3 repeated containers"),
        (podresources_pb2, "ContainerResources", "1 name, 2 repeated devices"),
        (podresources_pb2, "ContainerDevices", "1 resource_name, 2 repeated device_ids"),
    ],
)
def test_field_numbers_are_the_kubelets(module, message: str, fields: str) -> None:
    found = descriptor_pb2.DescriptorProto()
    module.DESCRIPTOR.message_types_by_name[message].CopyToProto(found)
    assert ", ".join(f"{f.number} {LABELS[f.label]}{f.name}" for f in found.field) == fields


def test_packages_are_the_kubelets() -> None:
    assert (deviceplugin_pb2.DESCRIPTOR.package, podresources_pb2.DESCRIPTOR.package) == ("v1beta1", "v1")
