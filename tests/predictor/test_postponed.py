"""Modules that have not run, on packages written for the purpose; each says in a list what of it ran."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from carpool_predictor.tracing.postponed import Postponing, _constants, _source, open_package, postpone

FILES = {
    "lazy_log.py": "ran = []\n",
    "lazy_pack/__init__.py": """
import lazy_log
lazy_log.ran.append("pack")
from .inner import spoken as said
from . import other
from .starred import *
__version__ = "7"
computed = 6 * 7
""",
    "lazy_pack/inner.py": "import lazy_log\nlazy_log.ran.append('inner')\nspoken = 'hello'\n",
    "lazy_pack/other.py": "import lazy_log\nlazy_log.ran.append('other')\nvalue = 1\n",
    "lazy_pack/starred.py": "import lazy_log\nlazy_log.ran.append('starred')\nSTAR: int = 5\ndef shine(): return 6\n",
    "lazy_pack/unasked.py": "import lazy_log\nlazy_log.ran.append('unasked')\nfrom lazy_pack import STAR\n",
}


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Put the packages where they can be imported, and return what of them ran."""
    for name, content in FILES.items():
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(content)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("lazy_log").ran
    for name in [name for name in sys.modules if name.startswith("lazy_")]:
        del sys.modules[name]


def test_a_postponed_module_runs_when_a_name_is_asked_for(ran: list[str]) -> None:
    postpone("lazy_pack", {})
    import lazy_pack  # type: ignore[import-not-found]

    assert ran == []
    assert lazy_pack.computed == 42
    assert ran[0] == "pack"


def test_given_names_run_nothing_and_others_replace_them(ran: list[str]) -> None:
    postpone("lazy_pack", {"said": "given"})
    from lazy_pack import said

    assert (said, ran) == ("given", [])
    assert importlib.import_module("lazy_pack").computed == 42
    assert importlib.import_module("lazy_pack").said == "hello"


def test_a_module_of_a_postponed_package_has_the_package_run_first(ran: list[str]) -> None:
    postpone("lazy_pack", {})
    importlib.import_module("lazy_pack.unasked")
    assert (ran[0], ran[-1]) == ("pack", "unasked")


def test_modules_that_need_nothing_of_it_are_imported_alone(ran: list[str]) -> None:
    postpone("lazy_pack", {}, ["inner"])
    assert importlib.import_module("lazy_pack.inner").spoken == "hello"
    assert ran == ["inner"]


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        pytest.param("said", "hello", ["inner"], id="imported under another name"),
        pytest.param("STAR", 5, ["starred"], id="by a star"),
        pytest.param("__version__", "7", [], id="spelt out"),
        pytest.param("computed", 42, ["pack", "inner", "other", "starred"], id="only running tells"),
    ],
)
def test_an_opened_package_runs_what_binds_the_name(
    name: str, value: object, expected: list[str], ran: list[str]
) -> None:
    open_package("lazy_pack")
    assert getattr(importlib.import_module("lazy_pack"), name) == value
    assert ran == expected


def test_an_opened_package_lets_a_module_inside_be_imported_alone(ran: list[str]) -> None:
    open_package("lazy_pack")
    importlib.import_module("lazy_pack.unasked")
    from lazy_pack import other

    assert other.value == 1
    assert ran == ["unasked", "starred", "other"]


def test_what_nobody_binds_is_missing_as_ever(ran: list[str]) -> None:
    open_package("lazy_pack")
    with pytest.raises(ImportError, match="cannot import name 'nowhere'"):
        from lazy_pack import nowhere  # noqa: F401
    assert ran[0] == "pack"


def test_what_is_imported_stays(ran: list[str]) -> None:
    before = importlib.import_module("lazy_pack")
    open_package("lazy_pack")
    postpone("lazy_pack", {"said": "given"})
    assert importlib.import_module("lazy_pack") is before
    assert before.said == "hello"


def test_what_is_not_installed_stays_missing() -> None:
    open_package("lazy_nothing.inside")
    postpone("lazy_nothing", {})
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("lazy_nothing")


def test_a_module_can_be_postponed_before_what_it_lies_in_is_imported(ran: list[str]) -> None:
    with Postponing({"lazy_pack.other": {}, "lazy_pack.inner": {"spoken": "given"}}, {}):
        package = importlib.import_module("lazy_pack")
    assert (package.said, ran) == ("given", ["pack", "starred"])
    assert package.other.value == 1
    assert ran == ["pack", "starred", "other"]
    assert importlib.import_module("lazy_pack.inner").__name__ == "lazy_pack.inner"


def test_a_package_postponed_so_runs_before_a_module_inside(ran: list[str]) -> None:
    with Postponing({"lazy_pack": {}}, {}):
        importlib.import_module("lazy_pack")
        assert ran == []
    importlib.import_module("lazy_pack.unasked")
    assert (ran[0], ran[-1]) == ("pack", "unasked")


def test_what_it_is_the_first_to_import_is_imported_all_the_same(ran: list[str]) -> None:
    (Path(importlib.import_module("lazy_log").__file__ or "").parent / "lazy_first.py").write_text(
        "import lazy_log\nlazy_log.ran.append('first')\n"
    )
    with Postponing({"lazy_pack": {}}, {"lazy_pack": "lazy_first"}):
        importlib.import_module("lazy_pack")
    assert ran == ["first"]


def test_what_is_not_installed_is_not_postponed() -> None:
    with Postponing({"lazy_nothing": {}}, {}), pytest.raises(ModuleNotFoundError):
        importlib.import_module("lazy_nothing")


def test_what_an_init_tells_is_read_wherever_it_stands(tmp_path: Path) -> None:
    """Only unindented imports of names and plain constants are parsed; where that fails, all of it is."""
    init = tmp_path / "__init__.py"
    init.write_text(
        '"""Says:\nfrom . import quoted\n"""\n'
        "from .a import (\n    one,\n    two as deux,  # twice\n)\n"
        "from .b import three  # (in brackets)\n"
        "import os\nif os.sep:\n    from .c import hidden\n"
        "__version__ = '1.2'  # of all\n"
        "computed = os.sep\n"
    )
    assert {name: _source(name, "pack", init) for name in ("one", "deux", "three", "hidden", "quoted")} == {
        "one": ("pack.a", "one"),
        "deux": ("pack.a", "two"),
        "three": ("pack.b", "three"),
        "hidden": None,
        "quoted": None,
    }
    assert _constants(init) == {"__version__": "1.2"}
    longer = tmp_path / "longer" / "__init__.py"
    longer.parent.mkdir()
    longer.write_text("from .a import one, \\\n    two\n")
    assert _source("two", "pack", longer) == ("pack.a", "two")
