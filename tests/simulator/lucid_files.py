"""Measurements like Lucid's, made up: three models and one pair of them."""

from pathlib import Path

_SOLO = "model,dataset,batchsize,amp,speed,gpu_util,gmem_util,gmem,label\n" + "".join(
    f"{model},D,32,0,100,{util},10,2000,0\n"
    for model, util in (("ResNet18", 40), ("MobileNetV2", 60), ("EfficientNet", 20))
)
_PAIRS = (
    "model1,dataset1,gpu_num1,batchsize1,amp1,speed1,model2,dataset2,gpu_num2,batchsize2,amp2,speed2,gpu_util,gmem_util,"
    "gmem\n" + 5 * "ResNet18,D,1,32,0,0.8,MobileNetV2,D,1,32,0,0.5,90,20,4000\n"
)


def write_lucid(data: Path) -> None:
    """Write them where they are looked for in a folder of measurements."""
    folder = data / "lucid"
    folder.mkdir()
    (folder / "solo_rtx3090.csv").write_text(_SOLO)
    (folder / "colocate_rtx3090.csv").write_text(_PAIRS)
