"""What the API server says of a pod, said of the template that it was made from."""

import pytest
from carpool_core.kube.api import PODS
from carpool_core.kube.errors import Invalid
from carpool_operator.conditions import find
from carpool_operator.pods import is_about_the_pod, template_message
from operator_world import World

MISSPELT = (
    'Pod in version "v1" cannot be handled as a Pod: strict decoding error: '
    'unknown field "spec.containers[0].comand", unknown field "spec.restartpolicy"'
)
POD = {
    "spec": {
        "terminationGracePeriodSeconds": 1.5,
        "containers": [
            {"env": [{"name": "A", "value": "1"}]},
            {"env": [{"name": "B", "value": 5}, {"name": "C", "value": "c"}]},
        ],
    }
}
CASES = [
    pytest.param(
        MISSPELT,
        "spec.template.spec.containers[0].comand, spec.template.spec.restartpolicy: a pod has no such field; "
        "correct its spelling or remove it",
        id="fields that do not exist",
    ),
    pytest.param(
        'Pod in version "v1" cannot be handled as a Pod: json: cannot unmarshal string into Go struct field '
        "Container.spec.containers.command of type []string",
        "spec.template.spec.containers.command: expected []string, found a value of type string",
        id="a field of another type",
    ),
    pytest.param(
        'Pod in version "v1" cannot be handled as a Pod: json: cannot unmarshal number into Go struct field '
        "EnvVar.spec.containers.env.value of type string",
        "spec.template.spec.containers[1].env[0].value: expected string, found a value of type number",
        id="a value of another type in a list",
    ),
    pytest.param(
        'Pod in version "v1" cannot be handled as a Pod: json: cannot unmarshal number 1.5 into Go struct field '
        "PodSpec.spec.terminationGracePeriodSeconds of type int64",
        "spec.template.spec.terminationGracePeriodSeconds: expected int64, found a value of type number",
        id="a number of another type",
    ),
    pytest.param(
        'Pod "x-worker-0-1" is invalid: spec.containers[0].image: Required value',
        "spec.template.spec.containers[0].image: Required value",
        id="a value that cannot be",
    ),
    pytest.param(
        'Pod "x-worker-0-1" is invalid: [spec.volumes[0].name: Required value, spec.tolerations[0].key: Invalid value]',
        "spec.template: [spec.volumes[0].name: Required value, spec.tolerations[0].key: Invalid value]",
        id="several at once",
    ),
]


@pytest.mark.parametrize(("said", "told"), CASES)
def test_sentence_names_the_field_of_the_template(said: str, told: str) -> None:
    error = Invalid(f"POST pods default: {said}", server_message=said)
    assert template_message(error, POD) == told
    assert is_about_the_pod(error)


async def test_misspelt_field_fails_the_job_before_anything_is_traced() -> None:
    world = World()
    world.kube.fail_next("check", PODS, Invalid(f"POST pods default: {MISSPELT}", status=400, server_message=MISSPELT))
    world.apply(model={"catalog": {"name": "timm/resnet50"}})
    await world.settle()
    failed = find(world.job().status, "Failed")
    assert failed is not None
    assert failed.message.startswith("spec.template.spec.containers[0].comand, ")
    assert world.tracer.traced == []
    assert world.pods() == []


async def test_webhook_that_knows_no_dry_run_fails_nobody() -> None:
    world = World()
    said = 'admission webhook "a.example" does not support dry run'
    world.kube.fail_next("check", PODS, Invalid(f"POST pods default: {said}", status=400, server_message=said))
    world.apply()
    await world.settle()
    assert world.living() == ["x-worker-0-1"]


async def test_a_template_that_was_found_right_is_not_checked_for_the_next_job() -> None:
    world = World()
    for name in ("x", "y"):
        world.apply(name)
        await world.settle()
        assert world.living(name) == [f"{name}-worker-0-1"]
    assert [call.verb for call in world.kube.calls].count("check") == 1
    world.apply("z", template={"spec": {"containers": [{"name": "train", "image": "train:2"}]}})
    await world.settle()
    assert [call.verb for call in world.kube.calls].count("check") == 2


async def test_a_template_that_was_refused_is_checked_for_the_next_job() -> None:
    world = World()
    for name in ("x", "y"):
        world.kube.fail_next(
            "check", PODS, Invalid(f"POST pods default: {MISSPELT}", status=400, server_message=MISSPELT)
        )
        world.apply(name)
        await world.settle()
        assert find(world.job(name).status, "Failed") is not None
