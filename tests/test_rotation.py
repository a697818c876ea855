"""The closed form against its definition, for every width ratio (float64)."""

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from errors import UserError
from growth.rotation import dense, givens, rotate, theta
from tests.grown import row_sums

few = settings(max_examples=30)
old_sizes, new_sizes = st.integers(1, 40), st.integers(1, 60)  # g = 1 and g > d_old included
fractions = st.floats(-1, 1)


def unit(d: int, start: int, stop: int) -> torch.Tensor:
    u = torch.zeros(d, dtype=torch.float64)
    u[start:stop] = 1 / math.sqrt(stop - start)
    return u


def epsilon_of(fraction: float, d_old: int, g: int) -> float:
    return fraction * math.sqrt(1 + d_old / g) * 0.999999


def R_of(epsilon: float, d_old: int, g: int) -> tuple[float, torch.Tensor]:
    angle = theta(epsilon, d_old, d_old + g)
    return angle, dense((d_old, d_old + g), givens(angle))


@few
@given(old_sizes, new_sizes, fractions)
def test_R_is_orthogonal_and_equals_the_definition(d_old, g, fraction):
    angle, R = R_of(epsilon_of(fraction, d_old, g), d_old, g)
    d, (c, s) = d_old + g, (math.cos(angle), math.sin(angle))
    a, b = unit(d, 0, d_old), unit(d, d_old, d)
    I = torch.eye(d, dtype=torch.float64)  # noqa: E741
    definition = I + (c - 1) * (a.outer(a) + b.outer(b)) + s * (b.outer(a) - a.outer(b))
    torch.testing.assert_close(R, definition, atol=1e-12, rtol=0)
    torch.testing.assert_close(R @ R.T, I, atol=1e-12, rtol=0)
    torch.testing.assert_close(R @ a, c * a + s * b, atol=1e-12, rtol=0)


def test_R_is_not_orthogonal_when_G_is_not():
    R = dense((3, 5), torch.tensor([[1.0, 0.5], [0.0, 1.0]], dtype=torch.float64))
    assert (R @ R.T - torch.eye(5)).abs().max() > 0.1


@few
@given(old_sizes, new_sizes, fractions)
def test_row_sums_and_epsilon(d_old, g, fraction):
    epsilon = epsilon_of(fraction, d_old, g)
    angle, R = R_of(epsilon, d_old, g)
    for matrix, expected in ((R, row_sums(angle, d_old, d_old + g)),
                             (R.T, row_sums(-angle, d_old, d_old + g))):  # fmt: skip
        for i, rows in enumerate((slice(0, d_old), slice(d_old, None))):
            sums = torch.stack([matrix[rows, :d_old].sum(1), matrix[rows, d_old:].sum(1)], 1)
            torch.testing.assert_close(sums, expected[i].expand_as(sums), atol=1e-10, rtol=0)
    assert R.T[d_old].sum().item() == pytest.approx(epsilon, abs=1e-9)


@few
@given(old_sizes, new_sizes)
def test_epsilon_one_is_the_identity_bit_for_bit(d_old, g):
    for reading in ("row-sum", "block"):
        angle = theta(1.0, d_old, d_old + g, reading)
        assert torch.equal(dense((d_old, d_old + g), givens(angle)), torch.eye(d_old + g).double())


@few
@given(old_sizes, new_sizes)
def test_epsilon_zero_turns_all_ones_onto_u_old(d_old, g):
    _, R = R_of(0.0, d_old, g)
    d = d_old + g
    turned = R.T @ unit(d, 0, d)
    torch.testing.assert_close(turned, unit(d, 0, d_old), atol=1e-12, rtol=0)
    if d_old > 1:  # the other reading's zero is another rotation
        block = dense((d_old, d), givens(theta(0.0, d_old, d, "block")))
        assert (block.T @ unit(d, 0, d) - unit(d, 0, d_old)).abs().max() > 1e-3


@few
@given(st.lists(st.integers(1, 9), min_size=2, max_size=4), st.integers(0, 2), st.integers(0, 99))
def test_the_low_rank_update_equals_the_dense_product(sizes, dim, seed):
    gen = torch.Generator().manual_seed(seed)
    ages = tuple(sum(sizes[: i + 1]) for i in range(len(sizes)))
    A = torch.randn(len(sizes), len(sizes), dtype=torch.float64, generator=gen)
    G, shape = torch.linalg.qr(A).Q, [3, 4, 2]
    shape[dim] = ages[-1]
    x = torch.randn(shape, dtype=torch.float64, generator=gen)
    R = dense(ages, G)
    torch.testing.assert_close(R @ R.T, torch.eye(ages[-1]).double(), atol=1e-12, rtol=0)
    product = (R @ x.movedim(dim, 0).flatten(1)).view(x.movedim(dim, 0).shape).movedim(0, dim)
    torch.testing.assert_close(rotate(x, dim, ages, G), product, atol=1e-12, rtol=0)


def test_R_leaves_everything_outside_the_plane_alone():
    x = torch.randn(9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x[:6] -= x[:6].mean()
    x[6:] -= x[6:].mean()
    torch.testing.assert_close(rotate(x, 0, (6, 9), givens(0.7)), x)
    assert (rotate(x + 1, 0, (6, 9), givens(0.7)) - x - 1).abs().max() > 0.1


def test_rotate_has_the_right_gradients():
    x = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    G = torch.randn(2, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, G: rotate(x, 1, (3, 5), G), (x, G))


@pytest.mark.parametrize("epsilon", [2.1, -2.1, math.nan, math.inf])
def test_bad_epsilon_names_the_range(epsilon):
    with pytest.raises(UserError, match=r"\[-1\.73205, 1\.73205\]"):
        theta(epsilon, 8, 12)
    with pytest.raises(UserError, match=r"\[-1, 1\]"):
        theta(epsilon, 8, 12, "block")


@few
@given(old_sizes, new_sizes, st.floats(1.0001, 10))
def test_epsilon_beyond_the_bound_is_refused_and_the_bound_is_not(d_old, g, factor):
    bound = math.sqrt(1 + d_old / g)
    assume(bound * factor > bound + 1e-6)
    assert math.isfinite(theta(math.hypot(1, math.sqrt(d_old / g)), d_old, d_old + g))
    with pytest.raises(UserError, match="epsilon is"):
        theta(bound * factor, d_old, d_old + g)


def test_an_unknown_reading_is_refused():
    with pytest.raises(UserError, match="row-sum, block"):
        theta(0.5, 8, 12, "diagonal")
