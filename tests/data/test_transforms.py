"""Shifts between clients and augmentation, compared with NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_meta.data import from_partition, train_test_views, transforms
from fedjax_meta.study.scenario import SHIFTS
from fedjax_meta.task import Batch, Task

SIZES = np.array([10, 14, 8])


@pytest.fixture
def images():
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (32, 5, 5, 1), dtype=np.uint8), rng.integers(0, 4, 32)
    return from_partition(x, y, np.arange(32), SIZES, num_classes=4, views=train_test_views(SIZES))


def _rows(data, view, u):
    return slice(int(data.start[view][u]), int(data.start[view][u] + data.sizes(view)[u]))


def test_concept_shift_permutes_labels_by_group(images):
    shifted = transforms.concept_shift(images, num_groups=2, seed=1)
    mappings = []
    for u in range(3):
        whole = slice(_rows(images, "train", u).start, _rows(images, "test", u).stop)
        old, new = images.y[whole], shifted.y[whole]
        mappings.append({(a, b) for a, b in zip(old.tolist(), new.tolist(), strict=True)})
        assert len(mappings[-1]) == len(set(old.tolist())) == len(set(new.tolist()))
    assert all(a == b for a, b in mappings[0] | mappings[2]) and any(a != b for a, b in mappings[1])
    assert np.array_equal(shifted.x, images.x)


def test_concept_shift_gives_each_group_a_different_permutation():
    data = from_partition(np.zeros((18, 2)), np.tile(np.arange(3), 6), np.arange(18), [3] * 6)
    shifted = transforms.concept_shift(data, num_groups=6, seed=0)
    assert len({tuple(shifted.y[3 * u : 3 * u + 3]) for u in range(6)}) == 6


def test_rotation_is_by_client(images):
    turned = transforms.rotate(images, [0, 1, 2])
    for u in range(3):
        for view in ("train", "test"):
            for before, after in zip(images.x[_rows(images, view, u)], turned.x[_rows(images, view, u)], strict=True):
                assert np.array_equal(after, np.rot90(before, u))
    assert images.x is not turned.x


def test_noise_has_the_given_deviation_in_the_given_views():
    x = np.full((3000, 4, 4, 1), 128, np.uint8)
    sizes = np.array([1000, 2000])
    data = from_partition(x, np.zeros(3000, int), np.arange(3000), sizes, views=train_test_views(sizes))
    noisy = transforms.add_noise(data, [0.0, 0.1], seed=0)
    assert (noisy.x[:1000] == 128).all() and (noisy.x[_rows(data, "test", 1)] == 128).all()
    drawn = noisy.x[_rows(data, "train", 1)] / 255
    assert drawn.mean() == pytest.approx(128 / 255, abs=0.003) and drawn.std() == pytest.approx(0.1, rel=0.03)
    assert noisy.x.dtype == np.uint8


def test_clients_have_noise_of_their_own():
    data = from_partition(np.zeros((1000, 4)), np.zeros(1000, int), np.arange(1000), [500, 500])
    noise = np.asarray(transforms.add_noise(data, 1.0, seed=0, clip=None).x).reshape(2, -1)
    assert abs(np.corrcoef(noise)[0, 1]) < 0.1


def test_noise_on_floats_is_clipped_only_if_clip_is_given():
    data = from_partition(np.full((500, 3), 0.5), np.zeros(500, int), np.arange(500), [500])
    free, clipped = (transforms.add_noise(data, 3.0, seed=0, clip=clip) for clip in (None, (0.0, 1.0)))
    assert free.x.min() < -3 and clipped.x.min() == 0 and clipped.x.max() == 1
    assert np.clip(free.x, 0, 1) == pytest.approx(clipped.x)


def test_inputs_outside_0_and_1_are_not_clipped_by_default():
    inside, outside = np.linspace(0, 1, 1500).reshape(500, 3), np.linspace(-3, 3, 1500).reshape(500, 3)
    for x, clipped in ((inside, True), (outside, False)):
        noisy = transforms.add_noise(from_partition(x, np.zeros(500, int), np.arange(500), [500]), 0.1, seed=0).x
        assert (noisy.min() == 0 and noisy.max() == 1) if clipped else np.abs(noisy - x).max() < 0.6


def test_noise_on_white_pixels_stays_white_whatever_the_bounds():
    data = from_partition(np.full((500, 3), 255, np.uint8), np.zeros(500, int), np.arange(500), [500], scale=1 / 255)
    assert transforms.add_noise(data, 0.05, seed=0, clip=(0.0, 1.5)).x.min() > 180


def test_device_arrays_stay_device_arrays(images):
    on_device = jax.tree.map(jnp.asarray, images)
    assert isinstance(transforms.add_noise(on_device, 0.5, seed=0).x, jax.Array)
    assert isinstance(transforms.concept_shift(on_device, num_groups=3, seed=0).y, jax.Array)


def test_crops_are_windows_of_the_padded_image_and_half_are_flipped():
    image = np.arange(1, 37, dtype=np.float32).reshape(6, 6, 1)
    out = np.asarray(transforms.crop_and_flip(jax.random.key(0), jnp.tile(image, (2000, 1, 1, 1)), pad=2, fill=-1.0))
    padded = np.pad(image, ((2, 2), (2, 2), (0, 0)), constant_values=-1)
    windows = {}
    for i in range(5):
        for j in range(5):
            window = padded[i : i + 6, j : j + 6]
            windows[window.tobytes()] = (i, j, False)
            windows[window[:, ::-1].tobytes()] = (i, j, True)
    seen = [windows[one.tobytes()] for one in out]
    assert len({(i, j) for i, j, _ in seen}) == 25
    assert np.mean([flip for *_, flip in seen]) == pytest.approx(0.5, abs=0.05)
    # 25 equally likely shifts: chi-square with 24 degrees of freedom, 5 standard deviations above its mean are 59.
    counts = np.bincount([5 * i + j for i, j, _ in seen], minlength=25)
    assert ((counts - 80) ** 2 / 80).sum() < 59


def test_augmented_changes_only_the_inputs_of_the_loss():
    task = Task(
        init=lambda key: {},
        loss=lambda variables, batch, key: (jnp.sum(batch.x), variables),
        predict=lambda variables, x: x,
    )
    augmented = transforms.augmented(task, lambda key, x: 10 * x)
    batch = Batch(jnp.ones((2, 1)), jnp.zeros(2, jnp.int32), jnp.ones(2))
    assert float(augmented.loss({}, batch, jax.random.key(0))[0]) == 20
    assert augmented.predict is task.predict


def _regression():
    return from_partition(np.ones((4, 2)), np.ones(4), np.arange(4), [4], num_classes=0)


BAD = {
    "no labels": (
        lambda d: transforms.concept_shift(_regression(), num_groups=2, seed=0),
        "num_classes=0 must be at least 2: concept shift permutes class labels",
    ),
    "too many groups": (lambda d: transforms.concept_shift(d, num_groups=25, seed=0), "num_groups=25 is more than"),
    "no groups": (lambda d: transforms.concept_shift(d, num_groups=0, seed=0), "num_groups=0 must be"),
    "turns of another number of clients": (lambda d: transforms.rotate(d, [1]), r"quarter_turns must be integers \[N=3\]"),
    "fractional turns": (lambda d: transforms.rotate(d, [0.5, 1, 2]), "quarter_turns must be integers"),
    "no images": (lambda d: transforms.rotate(_regression(), [1]), "only square images"),
    "negative noise": (lambda d: transforms.add_noise(d, -1, seed=0), "std=-1 must be finite and at least 0"),
    "uint8 without bounds": (lambda d: transforms.add_noise(d, 1, seed=0, clip=None), "clip=None needs floating-point"),
    "unknown view": (lambda d: transforms.add_noise(d, 1, seed=0, views=("dev",)), "no view 'dev'"),
}


def test_clients_that_share_samples_are_refused(images):
    """What changes a client's samples would change those of the other."""
    twice = images.select(np.array([0, 0, 1]))
    for change in (
        lambda d: transforms.rotate(d, [1, 1, 0]),
        lambda d: transforms.concept_shift(d, num_groups=2, seed=0),
        lambda d: transforms.add_noise(d, 0.1, seed=0),
    ):
        with pytest.raises(ValueError, match="clients 0 and 1 have samples in common"):
            change(twice)


@pytest.mark.parametrize("case", BAD)
def test_an_error_names_the_argument(case, images):
    call, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        call(images)


def test_a_noise_shift_does_not_clip_features_that_are_no_pixels():
    x = np.random.default_rng(0).normal(20, 10, (400, 5)).astype(np.float32)
    data = from_partition(x, np.arange(400) % 2, np.arange(400), np.full(4, 100), num_classes=2)
    noisy = SHIFTS["noise"](data, share=1.0, std=0.5, seed=0)
    assert np.std(noisy.x - x) == pytest.approx(0.5, rel=0.05)
    inside = from_partition((x - x.min()) / np.ptp(x), np.arange(400) % 2, np.arange(400), np.full(4, 100), num_classes=2)
    clipped = SHIFTS["noise"](inside, share=1.0, std=0.5, seed=0).x
    assert clipped.min() == 0 and clipped.max() == 1


def test_noise_on_integers_is_refused():
    data = from_partition(np.arange(8).reshape(8, 1), np.arange(8) % 2, np.arange(8), np.full(2, 4), num_classes=2, scale=1.0)
    with pytest.raises(ValueError, match="noise needs floating-point inputs or images of uint8, not int"):
        transforms.add_noise(data, 0.1, seed=0, clip=None)
