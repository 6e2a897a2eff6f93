import sys
from pathlib import Path

import pytest
from hypothesis import settings

# --import-mode=importlib gives test folders no import path of their own; the world is shared by these files only.
sys.path.insert(0, str(Path(__file__).parent))

from extender_world import World
from http_world import a_server, make_certificates

# How long an example takes says more about the machine than about the code.
settings.register_profile("carpool", deadline=None)
settings.load_profile("carpool")


@pytest.fixture
def world():
    return World()


@pytest.fixture(scope="session")
def certificates(tmp_path_factory):
    """A folder of certificates for both sides."""
    return make_certificates(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def kube():
    return a_server()
