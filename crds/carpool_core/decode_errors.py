"""What a decoder says of values that people wrote, in their words."""

import re

_PLACE = re.compile(r"^(?P<said>.*?)(?: - at `\$(?P<place>[^`]*)`)?$", re.DOTALL)


def in_words(said: str) -> str:
    """Say what a decoder says, of a field as users write it: `spec.sharing.maxSlowdown: expected a number >= 1.0`."""
    found = _PLACE.match(said)
    place = "" if found is None else (found["place"] or "").lstrip(".")
    text = (said if found is None else found["said"]).replace("`", "")
    for theirs, ours in (("float", "a number"), ("int", "a whole number"), ("str", "a text"), ("object", "a mapping")):
        text = re.sub(rf"\b{theirs}\b", ours, text)
    text = text[:1].lower() + text[1:]
    return f"{place}: {text}" if place else text
