"""What a simulation learns from jobs that ran, and on which samples models were traced."""

from dataclasses import replace

from carpool_core.moves import SETTLED_S, TRIAL_S
from carpool_core.resources.node import Device
from carpool_core.values import GpuUuid, SharingMode, WhenSlowed
from carpool_simulator.engine import RESTART_S, Simulation
from carpool_simulator.profiles import job_of, prediction_of
from carpool_simulator.truth import SimJob
from simulated_world import A100, CARPOOL, LEARNS, Halved, NoSlowdown, ends, truth, workload

RESNET = "radrm/resnet18/cifar100/64"


def traced(name, over=1.0, at_s=0.0, work_s=1000.0, kind=RESNET, product=A100, **changes):
    """A job whose features were traced, and which truly takes so many times the bound that is predicted."""
    prediction = prediction_of(kind, product)
    memory = round(over * prediction.products[0].memory.upper_mib)
    of = truth(memory, 0.1, kind=kind, model=kind.rpartition("/")[0], product=product)
    return SimJob(name, at_s, work_s, 1, of, prediction, asked=job_of(kind), **changes)


def test_a_run_improves_the_prediction_of_the_next_job_of_its_kind():
    jobs = workload(*(traced(f"j{i}", 1.2, 2000.0 * i) for i in range(3)))
    assert Simulation(jobs, CARPOOL, NoSlowdown()).run().ooms == 3
    assert Simulation(jobs, LEARNS, NoSlowdown()).run().ooms == 1


def test_nothing_is_revealed_before_it_ran():
    """Both come at once: neither knows of the other; the third knows of both."""
    jobs = workload(traced("a", 1.2), traced("b", 1.2), traced("c", 1.2, 2000.0))
    assert Simulation(jobs, LEARNS, NoSlowdown()).run().ooms == 2


def test_jobs_run_alone_where_nothing_was_measured_until_some_were():
    names = ("resnet18", "resnet34", "efficientnet_b0", "mobilenetv3_small", "resnet18")
    kinds = [f"radrm/{name}/cifar100/32" for name in names]
    jobs = [traced(f"j{i}", 0.8, 200.0 * i, kind=kind, product="Tesla T4") for i, kind in enumerate(kinds)]
    at_work = replace(workload(*jobs), nodes=t4_nodes(4))
    shares = ends(Simulation(at_work, replace(LEARNS, strict=False), NoSlowdown()).run())
    assert shares == {f"j{i}": 200.0 * i + 1000.0 for i in range(5)}
    learned = Simulation(at_work, LEARNS, NoSlowdown()).run()
    assert ends(learned) == shares, "the last two share a GPU, because three jobs were measured by then"
    few = replace(at_work, nodes=t4_nodes(2), jobs=at_work.jobs[:3])
    assert ends(Simulation(few, LEARNS, NoSlowdown()).run())["j2"] == 2000.0, "no job joins those that run alone"
    assert ends(Simulation(few, replace(LEARNS, strict=False), NoSlowdown()).run())["j2"] == 1400.0


def t4_nodes(gpus):
    modes = [SharingMode.EXCLUSIVE, SharingMode.TIME_SLICING, SharingMode.MPS]
    return {
        "n": [
            Device(uuid=GpuUuid(f"GPU-{i}"), index=i, product="Tesla T4", memory_mib=15_360, modes=modes)
            for i in range(gpus)
        ]
    }


LEARNS_SLOWDOWNS = replace(LEARNS, strict=False, learns_slowdowns=True)


def two_pairs():
    """Two jobs of one kind share a GPU, after the first ran alone; two more of the kind come when both have ended."""
    return workload(*(traced(f"j{i}", 0.8, at_s, 1000.0) for i, at_s in enumerate((0.0, 200.0, 5000.0, 5000.0))))


def test_a_measured_slowdown_keeps_the_next_pair_of_these_families_apart():
    prior = Simulation(two_pairs(), replace(LEARNS_SLOWDOWNS, learns_slowdowns=False), Halved()).run()
    assert [ends(prior)[name] for name in ("j2", "j3")] == [7000.0, 7000.0], "the prior expects no slowdown"
    online = ends(Simulation(two_pairs(), LEARNS_SLOWDOWNS, Halved()).run())
    assert online["j0"] == 1800.0, "the first pair was measured, not evicted"
    assert sorted(online[name] for name in ("j2", "j3")) == [6000.0, 7000.0], "one after the other"


def test_the_last_job_to_come_leaves_when_the_first_is_slowed_and_comes_back_when_it_has_ended():
    jobs = replace(two_pairs(), jobs=two_pairs().jobs[:2])
    moving = replace(LEARNS_SLOWDOWNS, when_slowed=WhenSlowed.MOVE)
    found = Simulation(jobs, moving, Halved()).run()
    assert ends(found) == {"j0": 1045.0, "j1": 1045.0 + RESTART_S + 1000.0}, "half a step for each of 90 s"
    assert [one.ran_s for one in found.finished] == [1045.0, 1060.0], "the attempt that was lost does not count"


def test_a_slowed_job_leaves_at_its_checkpoint_and_goes_on_from_there():
    kinds = RESNET, "radrm/resnet34/cifar100/64"
    jobs = workload(*(traced(f"j{i}", 0.8, 200.0 * i, 3000.0 - 2000.0 * i, kind=kind) for i, kind in enumerate(kinds)))
    moving = replace(LEARNS_SLOWDOWNS, when_slowed=WhenSlowed.MOVE_AT_CHECKPOINT)
    found = {one.job.name: one for one in Simulation(jobs, moving, Halved()).run().finished}
    assert found["j1"].end_s < found["j0"].end_s
    assert found["j0"].start_s > 200.0 + TRIAL_S, "its second attempt"
    assert found["j0"].ran_s < found["j0"].end_s, "it waited in between"


def test_nothing_is_learned_of_slowdowns_where_no_job_ran_alone():
    """A slowdown needs a step time alone: of this run, or of an earlier one of the same job."""
    jobs = workload(*(traced(f"j{i}", 0.8, at_s, 1000.0) for i, at_s in enumerate((0.0, 0.0, 5000.0, 5000.0))))
    found = ends(Simulation(jobs, LEARNS_SLOWDOWNS, Halved()).run())
    assert [found[name] for name in ("j2", "j3")] == [7000.0, 7000.0]


def test_a_job_shares_on_trial_where_an_equal_one_with_as_many_workers_ran_alone():
    """A pair that its interval advises against is tried once the slowdown of both would be measured."""
    other = "radrm/resnet34/cifar100/64"
    moving = replace(LEARNS_SLOWDOWNS, when_slowed=WhenSlowed.MOVE, max_slowdown=1.1)

    def started(workers):
        runs = ("a", 0.0, RESNET, workers), ("b", 2000.0, other, 1), ("c", 5000.0, RESNET, 2), ("d", 5000.0, other, 1)
        jobs = [traced(name, 0.8, at_s, kind=kind, workers=number) for name, at_s, kind, number in runs]
        return {
            one.job.name: one.start_s
            for one in Simulation(workload(*jobs, gpus=2), moving, NoSlowdown()).run().finished
        }

    assert started(2)["d"] == 5000.0
    assert started(1)["d"] == 5000.0 + SETTLED_S, "a job with one worker says nothing about two"


def test_a_gpu_with_a_tenant_measured_beyond_its_limit_takes_no_third_job():
    late = traced("late", 0.8, 600.0, 1000.0, kind="radrm/resnet34/cifar100/64")
    jobs = replace(two_pairs(), jobs=[*two_pairs().jobs[:2], late])
    prior = ends(Simulation(jobs, replace(LEARNS_SLOWDOWNS, learns_slowdowns=False), Halved()).run())
    online = ends(Simulation(jobs, LEARNS_SLOWDOWNS, Halved()).run())
    assert prior["j0"] > online["j0"] == 1800.0
