"""What torch's losses divide by, recognised in every form that users give them."""

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from evenly.objective import Sum, Total
from evenly.training.denominators import _MODULES, recognise


def value(total: Any) -> float:
    assert isinstance(total, Total)
    return float(total.sum) / float(total.weight)


@settings(deadline=None, max_examples=60)
@given(
    samples=st.integers(1, 9),
    cut=st.integers(0, 9),
    positions=st.sampled_from([(), (3,), (2, 2)]),
    weighted=st.booleans(),
    ignored=st.sampled_from([-100, 0, 2]),
    smoothing=st.sampled_from([0.0, 0.1, 1.0]),
    probabilities=st.booleans(),
    seed=st.integers(0, 99),
)
def test_totals_of_two_parts_make_the_loss_of_the_whole(
    samples: int,
    cut: int,
    positions: tuple[int, ...],
    weighted: bool,
    ignored: int,
    smoothing: float,
    probabilities: bool,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn((samples, 4, *positions), generator=generator, dtype=torch.float64)
    target = torch.randint(0, 4, (samples, *positions), generator=generator)
    if probabilities:
        ignored = -100  # torch refuses another one with these
        target = torch.rand((samples, 4, *positions), generator=generator, dtype=torch.float64)
    elif bool((target == ignored).all()):
        return  # torch gives nan
    weight = torch.rand(4, generator=generator, dtype=torch.float64) if weighted else None
    loss = nn.CrossEntropyLoss(weight=weight, ignore_index=ignored, label_smoothing=smoothing)
    known = recognise(loss)
    assert known is not None
    cut = min(cut, samples)
    parts: list[Any] = [
        known(scores[rows], target[rows]) for rows in (slice(cut), slice(cut, None))
    ]
    whole = sum(float(p.sum) for p in parts) / sum(float(p.weight) for p in parts)
    assert whole == pytest.approx(float(loss(scores, target)), rel=1e-12)


@pytest.mark.filterwarnings("ignore:reduction")  # torch says this about its KLDivLoss
@pytest.mark.parametrize("kind", _MODULES)
def test_every_recognised_module_and_function_gives_torchs_own_mean_and_sum(kind: Any) -> None:
    a, b = torch.rand(6, 4, dtype=torch.float64), torch.rand(6, 4, dtype=torch.float64)
    if kind in (nn.CrossEntropyLoss, nn.NLLLoss):
        b = torch.randint(0, 4, (6,))
    expected = float(kind()(a, b))
    for form in (kind(), _MODULES[kind], functools.partial(_MODULES[kind], reduction="mean")):
        known = recognise(form)
        assert known is not None
        assert value(known(a, b)) == pytest.approx(expected, rel=1e-12)
    summed = recognise(kind(reduction="sum"))
    assert summed is not None
    total = summed(a, b)
    assert isinstance(total, Sum)
    assert float(total.value) == pytest.approx(float(kind(reduction="sum")(a, b)), rel=1e-12)


def test_a_broadcast_loss_divides_by_all_its_elements() -> None:
    known = recognise(F.l1_loss)
    assert known is not None
    with pytest.warns(UserWarning, match="broadcasting"):
        total = known(torch.rand(6, 4), torch.rand(6, 1))
    assert isinstance(total, Total)
    assert total.weight == 24


class Subclass(nn.CrossEntropyLoss):
    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return 2 * super().forward(input, target)


@pytest.mark.parametrize(
    "loss",
    [
        None,
        lambda p, t: F.cross_entropy(p, t),
        Subclass(),
        functools.partial(F.cross_entropy, size_average=True),
        nn.CrossEntropyLoss(reduction="none"),
        nn.KLDivLoss(reduction="batchmean"),
        nn.TripletMarginLoss(),
        [],
    ],
)
def test_what_is_not_known_beyond_doubt_is_not_recognised(loss: Any) -> None:
    assert recognise(loss) is None
