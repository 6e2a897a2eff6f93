"""The order of waiting jobs is the extender's business; the chart tells it which."""

from typing import Any

import pytest
from carpool_extender.queue.order import QueueOrder

pytestmark = pytest.mark.e2e


def test_the_longest_and_the_shortest_take_turns_by_default(chart: Any) -> None:
    assert chart.environment("extender")["CARPOOL_QUEUE_ORDER"] == QueueOrder.ALTERNATE


@pytest.mark.parametrize("order", list(QueueOrder))
def test_the_order_reaches_the_extender(render: Any, order: QueueOrder) -> None:
    assert render(settings={"queueOrder": str(order)}).environment("extender")["CARPOOL_QUEUE_ORDER"] == order
