"""Page of the documents that `-o json` and `-o yaml` print, read from their types."""

from collections.abc import Mapping

import msgspec
from carpool_core.crdgen import object_schema
from carpool_core.kubectl.views import Diagnosis, GpuViewList, JobViewList
from carpool_core.resources.schema import Resource
from carpool_extender.explain.commands import AnswerView
from carpool_extender.explain.queue_forecast import QueueView

from carpool_docs.markdown import code, table
from carpool_docs.markdown import page as page_of
from carpool_docs.resources import fields

_INTRODUCTION = """`carpool COMMAND -o json` and `-o yaml` print one document. A field with its default (an empty text
or list, 0, false) is left out, except at the top. New fields may be added in any version; a field is renamed or removed
in a new minor version only."""

DOCUMENTS: Mapping[str, type[Resource]] = {
    "status": JobViewList,
    "top": GpuViewList,
    "queue": QueueView,
    "explain and what-if": AnswerView,
    "diagnose": Diagnosis,
}
"""Documents by the commands that print them."""


def page() -> str:
    """Return the page."""
    parts = [_INTRODUCTION]
    for name, type_ in DOCUMENTS.items():
        info = msgspec.inspect.type_info(type_)
        if not isinstance(info, msgspec.inspect.StructType):
            raise TypeError(f"expected a msgspec Struct, found {type_!r}")
        rows = [
            (code(one.path), _type(one.schema), one.schema.get("description") or "")
            for one in fields(object_schema(info, with_defaults=False))
        ]
        parts += [f"## carpool {name}", table(("Field", "Type", "Meaning"), rows)]
    return page_of("Output of commands", *parts)


def _type(schema: Mapping[str, object]) -> str:
    enum = schema.get("enum")
    if isinstance(enum, list):
        return ", ".join(code(str(value)) for value in enum)
    return str(schema.get("type", "any"))
