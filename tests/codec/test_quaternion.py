import torch

from hqmq_compile.codec.quaternion import (
    HALF_UNITS,
    HURWITZ_UNITS,
    conjugate,
    dot,
    multiply,
    norm,
)


def as_set(q):
    return {tuple(row) for row in (2 * q).round().int().reshape(-1, 4).tolist()}


def test_hurwitz_units_are_a_group():
    assert len(as_set(HURWITZ_UNITS)) == 24
    assert as_set(multiply(HURWITZ_UNITS[:, None], HURWITZ_UNITS)) == as_set(HURWITZ_UNITS)
    assert as_set(conjugate(HURWITZ_UNITS)) == as_set(HURWITZ_UNITS)
    assert torch.equal(norm(HURWITZ_UNITS), torch.ones(24))


def test_half_units_hold_one_of_each_pair():
    assert as_set(torch.cat((HALF_UNITS, -HALF_UNITS))) == as_set(HURWITZ_UNITS)
    assert HALF_UNITS.dtype == torch.float32


def test_multiplication_rules():
    one, i, j, k = torch.eye(4)
    assert torch.equal(multiply(i, j), k)
    assert torch.equal(multiply(j, i), -k)
    assert torch.equal(multiply(i, i), -one)
    a, b = torch.randn(2, 100, 4, dtype=torch.float64)
    torch.testing.assert_close(norm(multiply(a, b)), norm(a) * norm(b))
    torch.testing.assert_close(conjugate(multiply(a, b)), multiply(conjugate(b), conjugate(a)))
    torch.testing.assert_close(dot(a, b), (a * b).sum(-1))
