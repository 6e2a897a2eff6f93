"""The names of nodes in requests: thousands, mostly the same as a moment ago, and costly to read."""

from collections import OrderedDict
from dataclasses import dataclass

import msgspec

from carpool_extender.view import Bools, Rows, View

REMEMBERED = 4
"""Lists that are remembered: what filter answers kube-scheduler sends back to prioritize as it was."""


@dataclass(frozen=True, slots=True, eq=False)
class Offer:
    """Some nodes that kube-scheduler offers."""

    raw: msgspec.Raw
    """Their names as JSON."""
    names: list[str]
    ids: Rows
    """(names,) Their indices in `View.node_names`; -1 for those that never reported GPUs."""

    def part(self, which: Bools, names: list[str]) -> "Offer":
        """Return an offer of some of them."""
        return Offer(msgspec.Raw(msgspec.json.encode(names)), names, self.ids[which])


class Offers:
    """Reads lists of names, and remembers the latest."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, tuple[int, Offer]] = OrderedDict()
        self._decoder = msgspec.json.Decoder(list[str])

    def read(self, raw: msgspec.Raw, view: View) -> Offer:
        """Return the nodes of a request.

        Raises:
            msgspec.DecodeError: It is no list of strings.
        """
        naming, found = self._known.get(bytes(raw), (0, None))
        if found is None or naming != view.naming:  # a node that was unknown may have appeared, one that was known gone
            names = self._decoder.decode(raw)
            found = Offer(raw.copy(), names, view.ids(names))
            self.remember(found, view)
        return found

    def remember(self, offer: Offer, view: View) -> None:
        """Expect these names again."""
        self._known[bytes(offer.raw)] = (view.naming, offer)
        while len(self._known) > REMEMBERED:
            self._known.popitem(last=False)
