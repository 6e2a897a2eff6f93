import sys
from pathlib import Path

import pytest
from hypothesis import settings

# --import-mode=importlib gives test folders no import path of their own; the world is shared by these files only.
sys.path.insert(0, str(Path(__file__).parent))

from extender_world import World

# How long an example takes says more about the machine than about the code.
settings.register_profile("carpool", deadline=None)
settings.load_profile("carpool")


SOLO = "model,dataset,batchsize,amp,speed,gpu_util,gmem_util,gmem,label\n" + "".join(
    f"{model},D,32,0,100,{util},10,2000,0\n"
    for model, util in (("ResNet18", 40), ("MobileNetV2", 60), ("EfficientNet", 20))
)
PAIRS = (
    "model1,dataset1,gpu_num1,batchsize1,amp1,speed1,model2,dataset2,gpu_num2,batchsize2,amp2,speed2,gpu_util,gmem_util,"
    "gmem\n" + 5 * "ResNet18,D,1,32,0,0.8,MobileNetV2,D,1,32,0,0.5,90,20,4000\n"
)


@pytest.fixture
def data(tmp_path):
    """A folder of measurements like Lucid's, made up."""
    folder = tmp_path / "lucid"
    folder.mkdir()
    (folder / "solo_rtx3090.csv").write_text(SOLO)
    (folder / "colocate_rtx3090.csv").write_text(PAIRS)
    return tmp_path


@pytest.fixture
def world():
    return World()
