"""Every registered codec keeps its promises: I9 (error within the stated bound for any finite input), exact sizes."""

import math
import struct
from random import Random

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from diloco.codecs.base import Codec
from diloco.codecs.encoded import EncodedVector
from diloco.codecs.registry import CODECS, codec
from diloco.codecs.top_k import _pack_indices
from diloco.core.fragments import PART_QUANTUM, PartLayout
from diloco.errors import ConfigError

LARGEST = torch.finfo(torch.float32).max
EVERY: dict[str, Codec] = {one.name: one for name in CODECS for one in (codec(name), codec(name).for_means)}
every_codec = pytest.mark.parametrize("name", EVERY)
finite = st.floats(allow_nan=False, allow_infinity=False, width=32)


def through(made: Codec, values: Tensor) -> Tensor:
    out = torch.full_like(values, math.nan)
    made.decode(encoded(made, values), out)
    return out


def encoded(made: Codec, values: Tensor) -> Tensor:
    data = torch.full((values.shape[0], made.part_bytes(values.shape[1])), 0xAB, dtype=torch.uint8)
    made.encode(values, data)
    return data


def check_bound(made: Codec, values: Tensor) -> None:
    # In fp64: the bound's own rounding must not hide or invent an excess.
    error = (through(made, values).double() - values.double()).abs()
    bound = made.error_bound(values).double()
    worst = int((error - bound).argmax())
    assert bool((error <= bound).all()), (
        f"{values.view(-1)[worst]} became {through(made, values).view(-1)[worst]}: "
        f"error {error.view(-1)[worst]} above the bound {bound.view(-1)[worst]}"
    )


def row(values: list[float], seed: int = 0, noise: float = 0.0) -> Tensor:
    """`values` scattered over a part, the rest zeros or noise."""
    generator = torch.Generator().manual_seed(seed)
    out = torch.randn(1, PART_QUANTUM, generator=generator) * noise
    places = torch.randperm(PART_QUANTUM, generator=generator)[: len(values)]
    out[0, places] = torch.tensor(values, dtype=torch.float32)
    return out


@every_codec
@given(st.lists(finite, min_size=1, max_size=64), st.integers(0, 100), st.sampled_from([0.0, 1e-40, 1e-8, 1.0, 1e30]))
@example([LARGEST, -LARGEST, 1.0, 1e-45], 0, 0.0)
@example([1e-45, -1e-45, 3e-45], 0, 0.0)
@example([2.0**-126, 2.0**-127, 1e-45], 0, 0.0)
@example([65504.0, 65520.0, 65536.0, 2.0**-24, 2.0**-25], 0, 0.0)
@example([2.0**15 * (1 - 2.0**-12), 2.0**16], 0, 1.0)
@example([0.0], 0, 0.0)
def test_i9_the_error_is_within_the_bound_for_any_finite_input(
    name: str, values: list[float], seed: int, noise: float
) -> None:
    check_bound(EVERY[name], row(values, seed, noise))


@every_codec
@given(st.integers(-149, 127), st.floats(0, 1), st.integers(0, 100))
def test_i9_the_error_is_within_the_bound_at_every_magnitude(
    name: str, exponent: int, spread: float, seed: int
) -> None:
    """Parts whose elements lie between 2^exponent and much less: what a real outer gradient looks like, scaled."""
    generator = torch.Generator().manual_seed(seed)
    mantissa = torch.rand(2, PART_QUANTUM, generator=generator) * 2 - 1
    smaller = torch.rand(2, PART_QUANTUM, generator=generator) * spread * 60
    check_bound(EVERY[name], (mantissa.double() * 2.0 ** (exponent - smaller.double())).float())


@every_codec
def test_i9_the_error_is_within_the_bound_for_every_kind_of_bit_pattern(name: str) -> None:
    generator = torch.Generator().manual_seed(7)
    bits = torch.randint(-(2**31), 2**31 - 1, (64, PART_QUANTUM), generator=generator, dtype=torch.int64)
    values = bits.to(torch.int32).view(torch.float32)
    check_bound(EVERY[name], torch.where(values.isfinite(), values, torch.zeros(())))


@every_codec
@pytest.mark.parametrize("fraction", [1.0, 1 - 2.0**-24, 1 - 2.0**-12, 0.999, 0.75])
def test_the_largest_numbers_stay_finite(name: str, fraction: float) -> None:
    values = torch.full((1, PART_QUANTUM), LARGEST * fraction)
    values[0, ::2] *= -1
    assert bool(through(EVERY[name], values).isfinite().all())
    check_bound(EVERY[name], values)


@every_codec
@given(st.integers(1, 64))
def test_part_bytes_is_exact_and_a_multiple_of_four(name: str, quanta: int) -> None:
    made, elements = EVERY[name], quanta * PART_QUANTUM
    size = made.part_bytes(elements)
    assert size % 4 == 0
    first, second = (torch.full((2, size), fill, dtype=torch.uint8) for fill in (0x00, 0xFF))
    values = torch.randn(2, elements)
    made.encode(values, first)
    made.encode(values, second)
    assert torch.equal(first, second)  # every byte is written, and by nothing but the values


@pytest.mark.parametrize(
    ("name", "per_value"),
    [
        ("fp32", 4.0), ("fp16", 2.0), ("bf16", 2.0), ("int8", 1.016), ("int4", 0.531), ("e3m0", 0.531),
        ("2bit", 0.266), ("topk", 0.029), ("topk mean", 0.064),
    ],
)  # fmt: skip
def test_bytes_per_value_are_what_the_documentation_says(name: str, per_value: float) -> None:
    elements = 64 * PART_QUANTUM
    assert EVERY[name].part_bytes(elements) / elements == pytest.approx(per_value, abs=5e-4)


@every_codec
@given(st.integers(2, 9), st.integers(0, 100), st.sampled_from([PART_QUANTUM, 3 * PART_QUANTUM]))
def test_the_bytes_of_a_part_depend_on_nothing_but_that_part(name: str, rows: int, seed: int, elements: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scales = 10.0 ** torch.randint(-40, 38, (rows, 1), generator=generator)
    values = (torch.randn(rows, elements, generator=generator).double() * scales).float().clamp(-LARGEST, LARGEST)
    made = EVERY[name]
    together = encoded(made, values)
    assert torch.equal(together, encoded(made, values))
    for index in range(rows):
        assert torch.equal(together[index : index + 1], encoded(made, values[index : index + 1].clone()))
    decoded = through(made, values)
    for index in range(rows):
        assert torch.equal(decoded[index : index + 1], through(made, values[index : index + 1].clone()))


@every_codec
def test_zeros_stay_exactly_zero(name: str) -> None:
    assert not through(EVERY[name], torch.zeros(3, PART_QUANTUM)).any()


@every_codec
@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_an_input_that_is_not_finite_never_crashes_and_stays_within_its_part(name: str, odd: float) -> None:
    values = torch.randn(3, PART_QUANTUM, generator=torch.Generator().manual_seed(0))
    clean = through(EVERY[name], values)
    values[1, 5] = odd
    values[1, 700] = math.nan
    decoded = through(EVERY[name], values)
    assert torch.equal(decoded[[0, 2]], clean[[0, 2]])


@every_codec
def test_encoding_what_was_decoded_changes_little_more(name: str) -> None:
    """A mean of equal contributions is encoded again on the way back: within the bound of the decoded values."""
    values = torch.randn(4, PART_QUANTUM, generator=torch.Generator().manual_seed(1))
    check_bound(EVERY[name], through(EVERY[name], values))


def test_fp32_is_the_bits_themselves() -> None:
    values = torch.randn(2, PART_QUANTUM)
    values[0, 0] = struct.unpack("<f", struct.pack("<I", 0x7FC01234))[0]  # a NaN with a payload
    assert torch.equal(through(codec("fp32"), values).view(torch.int32), values.view(torch.int32))


def test_fp16_keeps_eleven_bits_of_outer_gradients_far_below_fp16s_own_range() -> None:
    values = torch.randn(1, PART_QUANTUM, generator=torch.Generator().manual_seed(2)) * 1e-9
    assert not values.half().any()
    torch.testing.assert_close(through(codec("fp16"), values), values, rtol=2.0**-11, atol=1e-9 * 2.0**-36)


@every_codec
@given(st.integers(1, 9000), st.integers(1, 4))
def test_an_encoded_vector_gives_back_its_length_however_it_is_written(name: str, numel: int, parts: int) -> None:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    layout = PartLayout(numel)
    whole, pieces = EncodedVector(EVERY[name], layout), EncodedVector(EVERY[name], layout)
    whole.encode(0, values)
    step = parts * layout.part_elements
    for first in range(0, layout.num_parts, parts):
        start = first * layout.part_elements
        pieces.encode(first, values[start : start + step])
    assert torch.equal(whole.data, pieces.data)
    assert whole.num_bytes == layout.num_parts * EVERY[name].part_bytes(layout.part_elements)
    decoded = whole.decode(0, layout.num_parts).clone()
    assert decoded.shape == (numel,)
    last = layout.num_parts - 1
    assert torch.equal(whole.decode(last, 1), decoded[last * layout.part_elements :])


def test_an_unknown_codec_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(ConfigError, match="'zip' is unknown: choose one of fp32, fp16, bf16, int8"):
        codec("zip")


@every_codec
@given(st.integers(0, 1000), st.sampled_from(["normal", "one far", "steps", "sparse"]))
def test_decoding_lengthens_a_vector_by_at_most_the_norm_slack(name: str, seed: int, kind: str) -> None:
    """What a swarm's workers hold against each other: a longer vector than claimed is a lie."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(1, 4 * PART_QUANTUM, generator=generator)
    if kind == "one far":
        values[0, ::128] *= 1e4
    elif kind == "steps":  # all values but the largest are just above the middle between two codes
        values = torch.full((1, 4 * PART_QUANTUM), 0.5001 / (7 if seed % 2 else 6))
        values[0, ::128] = 1.0
    elif kind == "sparse":
        values = torch.where(values.abs() > 2, values, 0.0)
    decoded = through(EVERY[name], values)
    assert float(decoded.double().norm()) <= float(values.double().norm()) * EVERY[name].norm_slack


@every_codec
def test_rows_that_are_apart_in_memory_give_the_same_bytes(name: str) -> None:
    wide = torch.randn(3, 4 * PART_QUANTUM, generator=torch.Generator().manual_seed(3))
    apart = wide[:, PART_QUANTUM : 3 * PART_QUANTUM]
    assert not apart.is_contiguous()
    assert torch.equal(encoded(EVERY[name], apart), encoded(EVERY[name], apart.contiguous()))
    transposed = torch.randn(2 * PART_QUANTUM, 3, generator=torch.Generator().manual_seed(4)).t()
    assert torch.equal(encoded(EVERY[name], transposed), encoded(EVERY[name], transposed.contiguous()))


@every_codec
def test_no_part_at_all_is_encoded_to_nothing(name: str) -> None:
    assert encoded(EVERY[name], torch.empty(0, PART_QUANTUM)).numel() == 0
    assert through(EVERY[name], torch.empty(0, PART_QUANTUM)).numel() == 0


def test_int8_has_the_bytes_of_its_formula() -> None:
    values = torch.randn(4, 3 * PART_QUANTUM, generator=torch.Generator().manual_seed(5)) * 1e-3
    values[1, :300] = 0.0
    blocks = values.view(-1, 256)
    scales = blocks.abs().amax(dim=1, keepdim=True) / 127
    codes = (blocks / scales).nan_to_num_(nan=0.0).round_().clamp_(-127, 127).to(torch.int8)
    data = encoded(codec("int8"), values)
    assert torch.equal(data[:, : 3 * PART_QUANTUM].view(torch.int8), codes.view(4, -1))
    assert torch.equal(data[:, 3 * PART_QUANTUM :].view(torch.float32), scales.view(4, -1))


def test_int4_and_e3m0_decode_to_their_own_values() -> None:
    block = torch.tensor([-7, -3, 0, 1, 2, 5, 6, 7] * 16, dtype=torch.float32) / 7 * 0.7
    values = block.repeat(PART_QUANTUM // 128)[None]
    torch.testing.assert_close(through(codec("int4"), values), values, rtol=1e-6, atol=0.0)
    powers = torch.tensor([1, -0.5, 0.25, -0.125, 2**-4, -(2.0**-5), 2**-6, 0] * 16, dtype=torch.float32) * 0.3
    values = powers.repeat(PART_QUANTUM // 128)[None]
    assert torch.equal(through(codec("e3m0"), values), values)


@pytest.mark.parametrize("name", ["topk", "topk mean"])
def test_of_values_of_the_same_size_those_with_the_lowest_indices_are_sent(name: str) -> None:
    values = torch.full((1, 4096), 0.25)
    values[0, 1::2] *= -1
    values[0, 4000:4010] = 1.0
    decoded = through(EVERY[name], values)
    count = 64 if name == "topk" else 128
    expected = [*range(count - 10), *range(4000, 4010)]
    assert torch.nonzero(decoded[0]).flatten().tolist() == expected
    assert torch.equal(decoded[0, expected], values[0, expected])


def test_the_mean_of_two_sparse_contributions_loses_no_index() -> None:
    vectors = [torch.randn(1, 8192, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    made = codec("topk")
    mean = sum(through(made, one) for one in vectors) / 2
    kept = through(made.for_means, mean)
    assert torch.equal(kept != 0, mean != 0)
    assert float((kept - mean).norm() / mean.norm()) < 0.1


def test_indices_of_a_strange_peer_stay_within_their_chunk() -> None:
    made = codec("topk")
    noise = torch.randint(0, 256, (2, made.part_bytes(PART_QUANTUM)), dtype=torch.uint8)
    out = torch.empty(2, PART_QUANTUM)
    made.decode(noise, out)
    made.for_means.decode(
        torch.full((2, made.for_means.part_bytes(5120)), 255, dtype=torch.uint8), torch.empty(2, 5120)
    )


@pytest.mark.parametrize("name", [name for name in CODECS if codec(name).stable])
@given(st.lists(finite, min_size=1, max_size=64), st.integers(0, 100), st.sampled_from([0.0, 1e-40, 1e-8, 1.0, 1e30]))
@example([LARGEST, -LARGEST, 1.0, 1e-45], 0, 0.0)
@example([32767.9, 1e-3], 0, 0.0)
@example([-0.0, 2.0**-126, 2.0**-127, 1e-45], 0, 0.0)
def test_what_a_stable_codec_decodes_it_encodes_to_the_same_bytes(
    name: str, values: list[float], seed: int, noise: float
) -> None:
    """So the mean of one contribution is that contribution, byte for byte."""
    made, source = codec(name), row(values, seed, noise)
    assert torch.equal(encoded(made, through(made, source)), encoded(made, source))


def test_the_codecs_of_single_floats_are_stable() -> None:
    assert {name for name in CODECS if codec(name).stable} == {"fp32", "fp16", "bf16"}


@every_codec
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e15])
def test_the_norm_of_the_error_bound_is_that_of_the_bound_or_little_more(name: str, scale: float) -> None:
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(3, 4 * PART_QUANTUM, generator=generator) * scale
    values[1, ::7] *= 100
    values[2] = 0.0
    told = EVERY[name].error_norm(values).double()
    right = torch.linalg.vector_norm(EVERY[name].error_bound(values).double(), dim=1)
    assert told.shape == (3,)
    least = 1e-18  # what fp32 can square
    assert bool((told >= (1 - 1e-5) * right - least).all()) and bool((told <= 1.01 * right + least).all())


# Bytes of others


@every_codec
@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    st.integers(0, 1 << 32),
    st.sampled_from([b"", b"\xff", b"\x00\x00\xc0\x7f", b"\x00\x00\x80\x7f", b"\x00"]),
)
def test_any_bytes_decode_to_the_same_values_in_whatever_batch_they_are(name: str, seed: int, filling: bytes) -> None:
    """Also with scales that are nan, infinite or negative, and indices that are double or out of range."""
    made, elements, random = EVERY[name], 3 * PART_QUANTUM, Random(seed)
    size = 4 * made.part_bytes(elements)
    content = random.randbytes(size) if not filling else (filling * size)[:size]
    mixed = bytearray(content)
    for _ in range(16):
        place = random.randrange(size)
        mixed[place] = random.randrange(256)
    data = torch.frombuffer(mixed, dtype=torch.uint8).view(4, -1)
    together, alone = torch.empty(4, elements), torch.empty(4, elements)
    made.decode(data, together)
    for index in range(4):
        made.decode(data[index : index + 1], alone[index : index + 1])
    assert torch.equal(together.isnan(), alone.isnan())
    assert torch.equal(together.nan_to_num(), alone.nan_to_num())


@pytest.mark.parametrize("made", [codec("topk"), codec("topk").for_means], ids=["topk", "mean"])
def test_an_index_that_is_not_above_those_before_it_counts_for_nothing(made: Codec) -> None:
    count = 128 if made.name == "topk mean" else 64
    kept = 10 * torch.arange(count)
    values = torch.zeros(1, 4096)
    values[0, kept] = torch.where(kept == 0, 5.0, -5.0)
    data = encoded(made, values)
    places = torch.cat([kept[:1].expand(3), kept[1 : count - 2]]).view(1, -1)  # the first index thrice
    data[:, : count * 12 // 8] = _pack_indices(places)
    after = torch.empty_like(values)
    made.decode(data, after)
    assert after[0, 0] == 5.0 and after.nonzero()[:, 1].tolist() == kept[: count - 2].tolist()
