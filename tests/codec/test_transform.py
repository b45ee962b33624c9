import pytest
import torch

from hqmq_compile.codec import transform


@pytest.mark.parametrize("block", [1, 2, 7, 64])
def test_block_mean_of_valid_tokens(block):
    x = torch.randn(2, 3, block, 16)
    valid = torch.rand(2, 3, block) < 0.7
    valid[0, 0] = False
    x[~valid] = torch.nan
    mean = transform.block_mean(x, valid)
    assert mean.dtype == torch.float16 and mean.shape == (2, 3, 16)
    assert not mean[0, 0].any()
    expected = torch.where(valid[..., None], x, 0).double().sum(-2)
    expected /= valid.sum(-1, keepdim=True).clamp(min=1)
    torch.testing.assert_close(mean.double(), expected, atol=1e-3, rtol=1e-3)


def test_block_mean_stays_finite():
    x = torch.full((1, 4, 8), -3e38)
    assert transform.block_mean(x, torch.ones(1, 4, dtype=torch.bool)).isfinite().all()


def test_block_mean_does_not_depend_on_the_batch():
    x = torch.randn(5, 64, 48)
    valid = torch.ones(5, 64, dtype=torch.bool)
    whole = transform.block_mean(x, valid)
    for i in range(5):
        assert torch.equal(transform.block_mean(x[i], valid[i]), whole[i])


@pytest.mark.parametrize("dim", [4, 64, 128, 256])
def test_rotation_is_orthogonal_and_keeps_scores(dim):
    matrix = transform.hadamard(dim, seed=3)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(dim))
    assert torch.equal(matrix.abs(), torch.full_like(matrix, dim**-0.5))
    x, q = torch.randn(10, dim), torch.randn(10, dim)
    torch.testing.assert_close(transform.rotate(x, 3), x @ matrix)
    torch.testing.assert_close(transform.unrotate(transform.rotate(x, 3), 3), x)
    rotated = (transform.rotate(q, 3) * transform.rotate(x, 3)).sum(-1)
    torch.testing.assert_close(rotated, (q * x).sum(-1), atol=1e-4, rtol=1e-4)


def test_signs_come_from_the_seed():
    assert not torch.equal(transform.hadamard(64, 3), transform.hadamard(64, 4))


def test_rotation_is_pinned():
    # Stored keys are only readable with the signs they were written with.
    signs = "".join("+" if s > 0 else "-" for s in transform.hadamard(16, 0)[:, 0].tolist())
    assert signs == "-++-+++++++--+--"


def test_rotation_needs_a_power_of_two():
    with pytest.raises(ValueError, match="power of two, got 80"):
        transform.rotate(torch.zeros(80), 0)
