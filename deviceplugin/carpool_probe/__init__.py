"""Step probe: counts a training's steps in a 4 KiB file that the node agent reads. Depends only on Python 3.8 or later.

In containers of GpuTrainingJobs it starts by itself and needs no change of the training script; `start` has the import
hooks, `torch_hooks` what they time, `recorder` the format of the file. A training loop without PyTorch calls

    try:
        from carpool_probe import step
    except ImportError:  # outside of Carpool
        def step(samples=0): ...

    for batch in batches:
        train(batch)
        step(len(batch))
"""


def step(samples: int = 0) -> None:
    """Count one training step of this process.

    Args:
        samples: Samples of the step; 0 if unknown.
    """
    from carpool_probe.recorder import recorder  # not at the start of every interpreter

    recorder.count_step("carpool_probe.step", samples)
