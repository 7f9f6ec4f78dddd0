"""SyncBatchNorm: every number is that of nn.BatchNorm on the batch of all ranks."""

import copy
import itertools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

import evenly
from evenly.errors import NoWorldError, RankFailedError, SettingError
from evenly.layers import SyncBatchNorm
from evenly.testing import run_ranks
from programs import largest_difference

CHANNELS = 4
KINDS: dict[int, Any] = {
    2: nn.BatchNorm1d,
    3: nn.BatchNorm1d,
    4: nn.BatchNorm2d,
    5: nn.BatchNorm3d,
}
SPACES: list[tuple[int, ...]] = [(), (5,), (3, 2), (2, 3, 2)]
ON_GPU = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here"),
    ],
)


def plain(space: tuple[int, ...], **options: Any) -> nn.Module:
    """A BatchNorm whose weights are not the initial ones."""
    norm: nn.Module = KINDS[2 + len(space)](CHANNELS, **options).double()
    torch.manual_seed(1)
    for parameter in norm.parameters():
        nn.init.normal_(parameter, 1.0)
    return norm


def batch(space: tuple[int, ...], total: int, number: int) -> tuple[Tensor, Tensor]:
    """Samples, and what the loss weighs their outputs with."""
    torch.manual_seed(10 + number)
    shape = (total, CHANNELS, *space)
    spread = torch.rand(CHANNELS, *[1] * len(space), dtype=torch.float64) * 3
    return torch.randn(shape, dtype=torch.float64) * spread + 5, torch.randn(shape).double()


def walk(norm: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    """Forward and backward on each batch in turn: all that comes out."""
    outputs, gradients = [], []
    for x, weights in batches:
        x = x.detach().requires_grad_()
        y = norm(x)
        (y * weights).sum().backward()
        assert x.grad is not None
        outputs.append(y.detach().cpu())
        gradients.append(x.grad.cpu())
    return {
        "outputs": outputs,
        "input gradients": gradients,
        "parameter gradients": [p.grad.cpu() for p in norm.parameters() if p.grad is not None],
        "buffers": {name: value.cpu() for name, value in norm.state_dict().items()},
    }


def on_a_rank(
    space: tuple[int, ...], counts: list[int], mode: str, device: str, options: dict[str, Any]
) -> dict[str, Any]:
    with evenly.open_world(device=device, backend="gloo") as world:
        norm = SyncBatchNorm.convert(plain(space, **options)).to(world.device)
        norm.train(mode == "train")
        own = slice(sum(counts[: world.rank]), sum(counts[: world.rank + 1]))
        batches = [batch(space, sum(counts), number) for number in range(2)]
        return walk(norm, [(x[own].to(world.device), w[own].to(world.device)) for x, w in batches])


def compare(
    space: tuple[int, ...],
    counts: list[int],
    mode: str = "train",
    device: str = "cpu",
    **options: Any,
) -> None:
    found = run_ranks(on_a_rank, 3, space, counts, mode, device, options)
    norm = plain(space, **options).train(mode == "train")
    wanted = walk(norm, [batch(space, sum(counts), number) for number in range(2)])
    for name in ("outputs", "input gradients"):
        joined = [torch.cat(pieces) for pieces in zip(*(f[name] for f in found), strict=True)]
        assert largest_difference(joined, wanted[name]) <= 1e-12, name
    sums = [sum(parts) for parts in zip(*(f["parameter gradients"] for f in found), strict=True)]
    assert len(sums) == len(wanted["parameter gradients"])
    for one, other in zip(sums, wanted["parameter gradients"], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    for rank in found:
        assert rank["buffers"].keys() == wanted["buffers"].keys()
        for name, value in rank["buffers"].items():
            torch.testing.assert_close(value, wanted["buffers"][name], rtol=0, atol=1e-12)
            assert torch.equal(value, found[0]["buffers"][name]), "ranks differ in some bits"


@pytest.mark.parametrize("device", ["cpu", ON_GPU])
@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("counts", [[4, 4, 4], [6, 1, 2], [0, 5, 0], [1, 1, 0]])
def test_every_number_is_that_of_the_whole_batch(
    space: tuple[int, ...], counts: list[int], device: str
) -> None:
    compare(space, counts, device=device)


@pytest.mark.parametrize("device", ["cpu", ON_GPU])
@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize(
    "options",
    [
        {"momentum": None},
        {"momentum": 1.0, "eps": 0.1},
        {"affine": False},
        {"track_running_stats": False},
        {"affine": False, "track_running_stats": False},
    ],
)
def test_and_with_every_option_in_both_modes(
    options: dict[str, Any], mode: str, device: str
) -> None:
    compare((3,), [3, 0, 2], mode, device, **options)


def how_many_meetings() -> list[int]:
    """Sums over ranks in: forward, backward, forward without gradients, eval."""
    with evenly.open_world():
        norm = SyncBatchNorm(CHANNELS)
        x = torch.randn(3, CHANNELS, requires_grad=True)
        with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as meeting:
            counts = [0]
            y = norm(x)
            counts.append(meeting.call_count)
            y.square().sum().backward()
            counts.append(meeting.call_count)
            with torch.no_grad():
                norm(x)
            counts.append(meeting.call_count)
            norm.eval()(x).sum().backward()
            counts.append(meeting.call_count)
        return [later - earlier for earlier, later in itertools.pairwise(counts)]


def test_ranks_meet_once_forward_and_once_backward_and_not_in_eval() -> None:
    assert run_ranks(how_many_meetings, 2) == [[1, 1, 1, 0]] * 2
    assert run_ranks(how_many_meetings, 1) == [[0, 0, 0, 0]]


def without_gradients() -> tuple[bool, dict[str, Tensor]]:
    with evenly.open_world() as world, torch.no_grad():
        norm = SyncBatchNorm(CHANNELS).double()
        x, _ = batch((), 6, 0)
        y = norm(x[world.rank :: world.size])
        return y.requires_grad, norm.state_dict()


def test_running_statistics_follow_in_training_mode_without_gradients() -> None:
    norm = nn.BatchNorm1d(CHANNELS).double()
    norm(batch((), 6, 0)[0])
    for needs, state in run_ranks(without_gradients, 3):
        assert not needs
        for name, value in norm.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-12)


def some_need_no_gradient() -> Tensor | None:
    with evenly.open_world() as world:
        norm = SyncBatchNorm(CHANNELS).double()
        x, weights = (tensor[world.rank :: 3] for tensor in batch((), 6, 0))
        x.requires_grad_(world.rank == 1)
        (norm(x) * weights).sum().backward()
        return x.grad


def test_an_input_may_need_a_gradient_on_some_ranks_only() -> None:
    wanted = walk(nn.BatchNorm1d(CHANNELS).double(), [batch((), 6, 0)])["input gradients"][0]
    found = run_ranks(some_need_no_gradient, 3)
    assert [gradient is None for gradient in found] == [True, False, True]
    torch.testing.assert_close(found[1], wanted[1::3], rtol=0, atol=1e-12)


def too_few(count: int) -> tuple[str, list[int], Any]:
    with evenly.open_world() as world:
        norm = SyncBatchNorm(CHANNELS)
        x = torch.ones(count if world.rank == 1 else 0, CHANNELS, requires_grad=True)
        try:
            y = norm(x)
        except ValueError as error:
            return str(error), [], None
        y.sum().backward()
        return "", list(y.shape), norm.state_dict()


def test_one_value_over_all_ranks_is_refused_on_every_rank() -> None:
    for text, _, _ in run_ranks(too_few, 3, 1):
        assert "Expected more than 1 value per channel when training, got 1 over all ranks" in text


def test_a_batch_without_samples_changes_no_statistics() -> None:
    for _, shape, state in run_ranks(too_few, 3, 0):
        assert shape == [0, CHANNELS]
        assert state["running_mean"].tolist() == [0.0] * CHANNELS
        assert state["running_var"].tolist() == [1.0] * CHANNELS


def far_batch(mean: float) -> tuple[Tensor, Tensor]:
    """Values that float32 holds exactly, but not their sum, let alone that of their squares."""
    torch.manual_seed(0)
    noise = torch.randn(300, CHANNELS, 5)
    return mean + (noise * 16).round().double() / 16, torch.randn(noise.shape)


def far_from_zero(mean: float, device: str) -> dict[str, Any]:
    with evenly.open_world(device=device, backend="gloo") as world:
        norm = SyncBatchNorm(CHANNELS, device=world.device)
        x, weights = (t.float()[world.rank :: 3].to(world.device) for t in far_batch(mean))
        return walk(norm, [(x, weights)])


# torch's kernels on CUDA add up in float32, which costs 5e-7 of the mean.
@pytest.mark.parametrize(
    ("mean", "limit", "device"),
    [(1e6, 1e-5, "cpu"), pytest.param(1e3, 2e-3, "cuda", marks=ON_GPU.marks)],
)
def test_a_large_mean_costs_no_digits(mean: float, limit: float, device: str) -> None:
    found = run_ranks(far_from_zero, 3, mean, device)
    x, weights = far_batch(mean)
    wanted = walk(nn.BatchNorm1d(CHANNELS).double(), [(x, weights)])
    for rank, numbers in enumerate(found):
        for name in ("outputs", "input gradients"):
            assert largest_difference(numbers[name], [wanted[name][0][rank::3]]) <= limit, name
        ratio = numbers["buffers"]["running_var"] / wanted["buffers"]["running_var"]
        assert float((ratio - 1).abs().max()) <= limit


def half_batch(kind: torch.dtype) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(9, 3, 6, 6).to(kind) + 1, torch.randn(9, 3, 6, 6).to(kind)


def half_precision(kind: torch.dtype, parameters: torch.dtype, device: str) -> dict[str, Any]:
    with evenly.open_world(device=device, backend="gloo") as world:
        norm = SyncBatchNorm(3, device=world.device, dtype=parameters)
        own = slice(world.rank * 3, world.rank * 3 + 3)
        x, weights = (tensor[own].to(world.device) for tensor in half_batch(kind))
        return walk(norm, [(x, weights)])


@pytest.mark.parametrize("device", ["cpu", ON_GPU])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_its_type_and_is_computed_in_float32(
    kind: torch.dtype, whole: bool, device: str
) -> None:
    parameters = kind if whole else torch.float32
    found = run_ranks(half_precision, 3, kind, parameters, device)
    x, weights = half_batch(kind)
    wanted = walk(nn.BatchNorm2d(3).double(), [(x.double(), weights.double())])
    for name in ("outputs", "input gradients"):
        joined = torch.cat([rank[name][0] for rank in found])
        assert joined.dtype == kind
        # Half a unit in the last place of each number, and next to nothing before that rounding;
        # but torch's kernels on CUDA round each dy * (x - mean) too, before they add them up.
        half_a_unit = torch.finfo(kind).eps / 2
        rough = device == "cuda" and name == "input gradients"
        torch.testing.assert_close(
            joined.double(), wanted[name][0], rtol=half_a_unit, atol=half_a_unit if rough else 1e-5
        )
    for rank in found:
        for name in ("running_mean", "running_var"):
            value = rank["buffers"][name]
            assert value.dtype == parameters
            tolerance = torch.finfo(parameters).eps
            torch.testing.assert_close(
                value.double(), wanted["buffers"][name], rtol=2 * tolerance, atol=1e-6
            )
        assert {gradient.dtype for gradient in rank["parameter gradients"]} == {parameters}


def in_autocast(device: str) -> tuple[torch.dtype, int, bool]:
    with evenly.open_world(device=device, backend="gloo") as world:
        net = nn.Sequential(nn.Conv2d(3, 4, 3), SyncBatchNorm(4), nn.ReLU()).to(world.device)
        with torch.autocast(world.device.type, torch.bfloat16):
            y = net(torch.randn(3, 3, 6, 6, device=world.device))
        y.float().square().mean().backward()
        gradients = [p.grad for p in net.parameters() if p.grad is not None]
        return y.dtype, len(gradients), all(bool(g.isfinite().all()) for g in gradients)


@pytest.mark.parametrize("device", ["cpu", ON_GPU])
def test_autocast_passes_through(device: str) -> None:
    assert run_ranks(in_autocast, 3, device) == [(torch.bfloat16, 4, True)] * 3


def in_other_layouts(device: str) -> list[tuple[Tensor, Tensor, bool]]:
    with evenly.open_world(device=device, backend="gloo") as world:
        x = torch.arange(6 * 4 * 8.0, dtype=torch.float64).sin().reshape(6, 4, 2, 4)
        x = x[world.rank * 3 :][:3].to(world.device)
        layouts = [
            x,
            x.contiguous(memory_format=torch.channels_last),
            x.repeat_interleave(2, dim=3)[..., ::2],
            x.transpose(2, 3).contiguous().transpose(2, 3),
        ]
        found = []
        for layout in layouts:
            leaf = layout.detach().requires_grad_()
            y = SyncBatchNorm(4).to(world.device).double()(leaf)
            y.pow(3).contiguous(memory_format=torch.channels_last).sum().backward()
            assert leaf.grad is not None
            last = y.is_contiguous(memory_format=torch.channels_last)
            found.append((y.detach().cpu(), leaf.grad.cpu(), last))
        return found


@pytest.mark.parametrize("device", ["cpu", ON_GPU])
def test_any_layout_gives_the_same_and_channels_last_stays_so(device: str) -> None:
    for found in run_ranks(in_other_layouts, 2, device):
        for y, gradient, last in found[1:]:
            assert largest_difference([y, gradient], list(found[0][:2])) <= 1e-12
            assert last == (y is found[1][0])


def second_derivative() -> str:
    with evenly.open_world():
        x = torch.randn(4, CHANNELS, requires_grad=True)
        y = SyncBatchNorm(CHANNELS)(x).pow(3).sum()
        try:
            torch.autograd.grad(y, x, create_graph=True)
        except SettingError as error:
            return str(error)
        return ""


def test_second_derivatives_are_refused() -> None:
    for text in run_ranks(second_derivative, 2):
        assert "create_graph=True" in text


def one_fails() -> str:
    with evenly.open_world() as world:
        x = torch.randn(3, CHANNELS + (world.rank == 1))
        try:
            SyncBatchNorm(CHANNELS)(x)
        except RankFailedError as error:
            return str(error)
        return ""


def test_a_rank_with_a_wrong_shape_fails_before_the_meeting_and_the_others_hear_of_it() -> None:
    with pytest.raises(
        ValueError, match=r"SyncBatchNorm\(4\) was given a tensor of shape \(3, 5\)"
    ):
        run_ranks(one_fails, 3)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.BatchNorm1d(1),  # the first layer: its input needs no gradient
        nn.Unflatten(2, (8, 8)),
        nn.Conv2d(1, 6, 3),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(216, 10),
        nn.BatchNorm1d(10, affine=False),
    ).double()


def train(batch_size: int, convert: bool) -> dict[str, Tensor]:
    net = SyncBatchNorm.convert(network()) if convert else network()
    x, y = evenly.data.digits()[0].tensors
    data = torch.utils.data.TensorDataset(x[:100, None].double(), y[:100])
    with evenly.open_world():
        model = evenly.replicate(net)
        for part in evenly.Loader(data, batch_size=batch_size, shuffle=True).epoch(0):
            samples, labels = part.data
            part.share(F.cross_entropy(model(samples), labels)).backward()
            for parameter in model.parameters():  # torch's optimizers take seconds to import
                assert parameter.grad is not None
                parameter.data -= 0.1 * parameter.grad
            model.zero_grad()
    return net.state_dict()


@pytest.mark.parametrize("batch_size", [34, 49])  # last steps of 32 and of 2: a rank has none
def test_training_gives_the_weights_and_statistics_of_one_process(batch_size: int) -> None:
    alone = run_ranks(train, 1, batch_size, convert=False)[0]
    for state in run_ranks(train, 3, batch_size, convert=True):
        assert state.keys() == alone.keys()
        for name, value in state.items():
            torch.testing.assert_close(value, alone[name], rtol=1e-12, atol=1e-12, msg=name)


@pytest.fixture(params=["no world", "a world of one"])
def perhaps_a_world(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.param == "no world":
        yield
    else:
        with evenly.open_world():
            yield


@pytest.mark.usefixtures("perhaps_a_world")
@pytest.mark.parametrize("space", SPACES)
def test_alone_it_is_batchnorm_to_the_last_bit(space: tuple[int, ...]) -> None:
    batches = [batch(space, 4, number) for number in range(2)]
    wanted = walk(plain(space), batches)
    with mock.patch("evenly.layers._Normalize.apply", side_effect=AssertionError):
        found = walk(SyncBatchNorm.convert(plain(space)), batches)
    for name, value in wanted["buffers"].items():
        assert torch.equal(found["buffers"][name], value)
    for name in ("outputs", "input gradients", "parameter gradients"):
        assert all(itertools.starmap(torch.equal, zip(found[name], wanted[name], strict=True)))
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        SyncBatchNorm(3)(torch.ones(1, 3))


def group_without_a_world() -> str:
    dist.init_process_group("gloo")
    try:
        norm = SyncBatchNorm(3)
        norm.eval()(torch.ones(2, 3))
        norm.train()(torch.ones(2, 3))
    except NoWorldError as error:
        return str(error)
    finally:
        dist.barrier()
        dist.destroy_process_group()
    return ""


def test_several_processes_without_a_world_are_not_left_to_their_own_statistics() -> None:
    for text in run_ranks(group_without_a_world, 2):
        assert "evenly.open_world()" in text


class Branches(nn.Module):
    """One BatchNorm in two places, one frozen, one InstanceNorm, and torch's SyncBatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.BatchNorm2d(3)
        self.left = nn.Sequential(nn.Conv2d(3, 3, 1), shared)
        self.right = nn.ModuleDict({"norm": shared, "other": nn.InstanceNorm2d(3, affine=True)})
        self.inner = nn.Sequential(nn.Sequential(nn.SyncBatchNorm(3, eps=0.5, momentum=None)))
        self.frozen = nn.BatchNorm3d(2, affine=True, dtype=torch.float64).eval()
        self.frozen.requires_grad_(False)
        self.bare = nn.BatchNorm1d(5, affine=False, track_running_stats=False)


def test_convert_replaces_every_batchnorm_and_keeps_what_it_has() -> None:
    model = Branches()
    before = dict(model.named_parameters())
    state = copy.deepcopy(model.state_dict())
    calls: list[str] = []
    model.frozen.register_forward_hook(lambda *_: calls.append("hook"))
    returned = SyncBatchNorm.convert(model)
    assert returned is model
    assert model.left[1] is model.right["norm"]
    assert all(after is before[name] for name, after in model.named_parameters())
    assert {name for name, m in model.named_modules() if isinstance(m, SyncBatchNorm)} == {
        "left.1",
        "inner.0.0",
        "frozen",
        "bare",
    }
    assert type(model.right["other"]) is nn.InstanceNorm2d
    inner = model.get_submodule("inner.0.0")
    assert isinstance(inner, SyncBatchNorm)
    assert (inner.eps, inner.momentum, inner.training) == (0.5, None, True)
    assert not hasattr(inner, "process_group")
    assert not model.frozen.training
    assert not model.frozen.weight.requires_grad
    assert model.frozen.running_mean is not None
    assert model.frozen.running_mean.dtype == torch.float64
    assert model.bare.weight is None
    assert model.bare.running_mean is None
    model.frozen(torch.ones(2, 2, 1, 1, 1, dtype=torch.float64))
    assert calls == ["hook"]
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name])
    assert SyncBatchNorm.convert(model) is model


def test_checkpoints_go_both_ways_between_batchnorm_and_its_converted_self() -> None:
    theirs, ours = network(), SyncBatchNorm.convert(network())
    theirs(torch.randn(4, 1, 64, dtype=torch.float64))
    ours.load_state_dict(theirs.state_dict())
    again = network()
    again.load_state_dict(ours.state_dict())
    for name, value in theirs.state_dict().items():
        assert torch.equal(again.state_dict()[name], value)
    assert isinstance(SyncBatchNorm.convert(nn.BatchNorm1d(3)), SyncBatchNorm)
    assert repr(SyncBatchNorm.convert(nn.BatchNorm2d(3))).startswith("SyncBatchNorm(3, eps=1e-05")


class Activated(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return F.relu(super().forward(input))


class Named(nn.BatchNorm2d):
    """A BatchNorm with other defaults only."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, eps=1e-3)


def test_convert_refuses_what_it_would_change_and_then_changes_nothing() -> None:
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Sequential(Activated(3)))
    with pytest.raises(SettingError, match=r"1\.0 \(Activated\) does more than a BatchNorm does"):
        SyncBatchNorm.convert(model)
    assert type(model[0]) is nn.BatchNorm2d
    lazy = nn.Sequential(nn.LazyBatchNorm1d())
    with pytest.raises(SettingError, match="does not know its number of channels yet"):
        SyncBatchNorm.convert(lazy)
    lazy.eval()(torch.randn(2, 3))
    assert isinstance(SyncBatchNorm.convert(lazy)[0], SyncBatchNorm)
    tied = nn.BatchNorm1d(3)
    parametrize.register_parametrization(tied, "weight", nn.Softplus())
    with pytest.raises(SettingError, match="does more than a BatchNorm"):
        SyncBatchNorm.convert(tied)
    some = nn.SyncBatchNorm(3)
    some.process_group = object()
    with pytest.raises(SettingError, match="over some of the ranks"):
        SyncBatchNorm.convert(some)
    assert SyncBatchNorm.convert(nn.Sequential(Named(3)))[0].eps == 1e-3
