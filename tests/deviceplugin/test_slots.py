"""The slots that the kubelet is offered."""

import pytest
from carpool_core.values import SharingMode
from carpool_deviceplugin.kubelet.plugin import slots

EXCLUSIVE, TIME_SLICING, MPS, _ = SharingMode


@pytest.mark.parametrize(
    ("healthy", "fine"), [pytest.param(2, 6, id="all"), pytest.param(1, 3, id="half"), pytest.param(0, 0, id="none")]
)
def test_slots_are_as_healthy_as_the_gpus(healthy: int, fine: int) -> None:
    named = slots(gpus=2, slots_per_gpu=3, healthy=healthy)
    assert [name for name, _ in named] == [f"slot-{i}" for i in range(6)]
    assert sum(is_fine for _, is_fine in named) == fine
