"""What was remembered of an operator, against the operator itself."""

import pytest
import torch
from carpool_predictor.tracing.operators import OperatorCache
from torch import Tensor
from torch._ops import OpOverload

aten = torch.ops.aten


def layouts(out: Tensor | tuple[Tensor | None, ...]) -> list[object]:
    tensors = [out] if isinstance(out, Tensor) else list(out)
    return [None if t is None else (t.shape, t.stride(), t.dtype, t.device.type) for t in tensors]


@pytest.mark.parametrize("channels_last", [False, True])
def test_answers_again_what_the_operator_gave(channels_last: bool) -> None:
    made = torch.channels_last if channels_last else torch.contiguous_format
    x = torch.empty(2, 8, 6, 6, device="meta").to(memory_format=made)
    weight = torch.empty(8, device="meta")
    arguments = {
        aten.native_batch_norm.default: (x, weight, weight, weight, weight, True, 0.1, 1e-5),
        aten.native_batch_norm_backward.default: (
            x, x, weight, None, None, weight, weight, True, 1e-5, [True, True, False],
        ),
        aten.gelu_backward.default: (x, x),
        aten._softmax.default: (x, 1, False),
    }  # fmt: skip
    remembered = OperatorCache()
    for func, args in arguments.items():
        wanted = layouts(func(*args))
        assert layouts(remembered.call(func, args, {})) == wanted
        assert layouts(remembered.call(func, args, {})) == wanted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("channels_last", [False, True])
def test_normalized_images_of_other_sizes_are_as_large_as_they_are(channels_last: bool, dtype: torch.dtype) -> None:
    made = torch.channels_last if channels_last else torch.contiguous_format
    remembered = OperatorCache()
    weight = torch.empty(8, device="meta")
    for shape in ((2, 8, 6, 6), (4, 8, 3, 5), (4, 8, 3, 3)):
        x = torch.empty(shape, dtype=dtype, device="meta").to(memory_format=made)
        other = torch.empty(shape, dtype=dtype, device="meta")
        forward = (x, weight, weight, weight, weight, True, 0.1, 1e-5)
        for gradient, needs in ((x, True), (other, True), (x, False), (other[:, :, :1, :1].expand(shape), True)):
            backward = (gradient, x, weight, None, None, weight, weight, True, 1e-5, [needs, True, True])
            for func, args in (
                (aten.native_batch_norm.default, forward),
                (aten.native_batch_norm_backward.default, backward),
            ):
                assert layouts(remembered.call(func, args, {})) == layouts(func(*args))


def test_tells_arguments_apart_that_look_alike() -> None:
    remembered = OperatorCache()
    x = torch.empty(4, 6, device="meta")
    narrow = x.to(torch.bfloat16)
    assert remembered.call(aten._softmax.default, (x, 1, False), {}).dtype is torch.float32
    assert remembered.call(aten._softmax.default, (narrow, 1, False), {}).dtype is torch.bfloat16
    assert remembered.call(aten._softmax.default, (x.T, 1, False), {}).shape == (6, 4)


def test_every_answer_is_a_tensor_of_its_own() -> None:
    remembered = OperatorCache()
    x = torch.empty(4, 6, device="meta")
    first, second = (remembered.call(aten._softmax.default, (x, 1, False), {}) for _ in range(2))
    assert first.untyped_storage()._cdata != second.untyped_storage()._cdata


def test_computes_on_real_tensors() -> None:
    remembered = OperatorCache()
    for value in (0.0, 1.0):
        x = torch.tensor([value, 0.0])
        assert torch.equal(remembered.call(aten._softmax.default, (x, 0, False), {}), x.softmax(0))


def test_tells_whole_numbers_from_others() -> None:
    """Regression: 1 and 1.0 are equal, and give another type of sum."""
    remembered = OperatorCache()
    x = torch.empty(4, dtype=torch.long, device="meta")
    assert remembered.call(aten.add.Scalar, (x, 1), {}).dtype is torch.long
    assert remembered.call(aten.add.Scalar, (x, 1.0), {}).dtype is torch.float32


def test_what_writes_into_its_argument_gives_it_back() -> None:
    remembered = OperatorCache()
    for _ in range(3):
        x = torch.empty(4, device="meta")
        assert remembered.call(aten.relu_.default, (x,), {}) is x


def test_lists_of_tensors_are_told_apart_and_not_kept() -> None:
    remembered = OperatorCache()
    for _ in range(2):
        for width in (2, 3):
            parts = [torch.empty(4, width, device="meta"), torch.empty(4, 1, device="meta")]
            assert remembered.call(aten.cat.default, (parts, 1), {}).shape == (4, width + 1)


@pytest.mark.parametrize(
    ("func", "options"),
    [
        pytest.param(aten._unsafe_view.default, ([8],), id="a view that its schema does not tell"),
        pytest.param(aten.unsafe_split.Tensor, (2,), id="parts of one memory"),
        pytest.param(aten.view.default, ([8],), id="a view"),
        pytest.param(aten.detach.default, (), id="an alias"),
    ],
)
def test_what_shares_memory_is_never_remembered(func: OpOverload, options: tuple[object, ...]) -> None:
    remembered = OperatorCache()
    for _ in range(3):
        x = torch.empty(4, 2, device="meta")
        out = remembered.call(func, (x, *options), {})
        first = out if isinstance(out, Tensor) else out[0]
        assert first.untyped_storage()._cdata == x.untyped_storage()._cdata


def test_what_changes_its_argument_is_never_remembered() -> None:
    remembered = OperatorCache()
    for _ in range(3):
        x = torch.empty(4, 2, device="meta")
        assert remembered.call(aten.t_.default, (x,), {}).shape == (2, 4)
        other = torch.empty(2, 4, device="meta")
        remembered.call(aten.set_.source_Tensor, (x, other), {})
        assert x.untyped_storage()._cdata == other.untyped_storage()._cdata
