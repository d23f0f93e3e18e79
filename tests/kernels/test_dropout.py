"""The dropout kernel draws what its twin draws, bit for bit, and the twin draws Philox4x32."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from laws import DEVICE, DTYPES, SEEDS, assert_matches, few

from fuseops.errors import FuseOpsError
from fuseops.kernels import dropout as k
from fuseops.kernels.dropout import draws

pytestmark = pytest.mark.usefixtures("kernels")
SIZES = st.sampled_from([0, 1, 17, 1024, 4097, 8191, 8192, 9000])


@given(SIZES, DTYPES, SEEDS, st.sampled_from([0.0, 0.1, 0.5, 0.999, 1.0]))
@few
def test_the_kernel_is_the_twin(n, dtype, seed, p):
    x = torch.randn(n).to(dtype)
    assert_matches(k.apply_dropout, x, torch.tensor([seed * 0x1_0000_0001 - 7]), p, exact=True)


def test_rows_of_a_view_have_the_places_of_its_elements():
    x = torch.randn(8, 96, device=DEVICE)[:, 3:80]
    seed = torch.tensor([5], device=DEVICE)
    assert torch.equal(
        k.apply_dropout.launcher(x, seed, 0.5), k.apply_dropout.twin(x.contiguous(), seed, 0.5)
    )


def test_a_seed_that_is_none_is_refused():
    with pytest.raises(FuseOpsError, match="one int64"):
        k.apply_dropout.launcher(torch.randn(4), torch.tensor([1.0]), 0.5)


def philox(counter, key, rounds):
    """Philox4x32 in Python's own integers."""
    low, c, (k0, k1) = 2**32 - 1, list(counter), key
    for _ in range(rounds):
        first, second = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [second >> 32 ^ c[1] ^ k0, second & low, first >> 32 ^ c[3] ^ k1, first & low]
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    return c


def test_this_philox_is_the_published_one():
    """Known answers of ten rounds, of the authors' test vectors."""
    assert philox([0] * 4, [0, 0], 10) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = 2**32 - 1
    assert philox([ones] * 4, [ones, ones], 10) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


@pytest.mark.parametrize("seed", [0, 1, 2**62 - 1, -5])
def test_draws_are_halves_of_the_words_of_a_counter(seed):
    found = draws(torch.tensor([seed]), 2 * 8192 + 100)
    key = seed & (2**32 - 1), (seed >> 32) & (2**32 - 1)
    for i in (0, 1, 7, 8, 1023, 1024, 8191, 8192, 2 * 8192 + 99):
        word = philox([i // 8, 0, 0, 0], key, 7)[i % 8 // 2]
        assert found[i].item() == (word & 0xFFFF if i % 2 else word >> 16)
