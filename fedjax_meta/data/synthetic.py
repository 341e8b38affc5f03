"""Generated clients: the synthetic(δ, θ) benchmark, and two regression problems with known optima and meta-gradients.

Axis letters: N clients, S samples, K classes, d dimensions.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from fedjax_meta import checks
from fedjax_meta.data.builders import from_partition, train_test_views
from fedjax_meta.data.federated import FederatedData
from fedjax_meta.data.samples import one_array


def synthetic(
    model_spread: float,
    data_spread: float,
    *,
    seed: int | np.random.Generator,
    num_clients: int = 30,
    sizes: str | ArrayLike = "uniform",
    spread: str = "variance",
    dim: int = 60,
    num_classes: int = 10,
    train: float = 0.7,
    support: float = 0.3,
) -> FederatedData:
    """Synthetic(δ, θ): clients whose models and inputs differ (Li et al., FedProx, MLSys 2020; Per-FedAvg-Reptile).

    Client i draws u ~ N(0, δ) and B ~ N(0, θ). Its model has entries W, b ~ N(u, 1), its centre has entries v ~ N(B, 1), its
    inputs are x ~ N(v, diag(j^-1.2)), and its labels are y = argmax(W x + b).

    As it is published, δ has no effect: u adds u (sum_j x_j + 1) to every class alike, and the argmax stays. The clients' models
    differ by their own draws around u, for every δ. Only θ makes clients more unlike.

    Args:
      model_spread: δ, at least 0; changes no sample, see above.
      data_spread: θ, at least 0.
      seed: an integer or a NumPy generator.
      num_clients: N.
      sizes: `"uniform"` (integers from [100, 1000], Per-FedAvg-Reptile), `"lognormal"` (int(lognormal(4, 2)) + 50, FedProx)
        or int `[N]`.
      spread: whether δ and θ are each a `"variance"` (text of Per-FedAvg-Reptile) or a standard `"deviation"` (code of
        FedProx); at 0 and 1 both agree.
      dim: d.
      num_classes: K.
      train: share of a client's samples for training.
      support: share of the training and of the test part for adaptation.

    Returns:
      Float inputs `[S, d]` with the views of `train_test_views`.

    Raises:
      ValueError: a negative spread, unknown options, `sizes` of another shape.
    """
    checks.not_negative("model_spread", model_spread)
    checks.not_negative("data_spread", data_spread)
    checks.one_of("spread", spread, ("variance", "deviation"))
    checks.count("num_clients", num_clients)
    checks.count("dim", dim)
    checks.count("num_classes", num_classes, least=2)
    checks.seed("seed", seed)
    rng = np.random.default_rng(seed)
    if isinstance(sizes, str):
        checks.one_of("sizes", sizes, ("uniform", "lognormal"))
        uniform = sizes == "uniform"
        drawn = rng.integers(100, 1001, num_clients) if uniform else rng.lognormal(4, 2, num_clients).astype(np.int64) + 50
    else:
        drawn = checks.numeric("sizes", sizes, integers=True)
        if drawn.shape != (num_clients,):
            raise ValueError(f"sizes must be 'uniform', 'lognormal' or counts [N={num_clients}], not of shape {drawn.shape}")
        if drawn.min() < 1:
            client = int(np.argmin(drawn))
            raise ValueError(f"every client needs at least 1 sample, but client {client} has {drawn[client] or 'none'}")
    deviation = np.sqrt([model_spread, data_spread]) if spread == "variance" else np.array([model_spread, data_spread])
    u, centre = deviation[:, None] * rng.standard_normal((2, num_clients))
    weight = u[:, None, None] + rng.standard_normal((num_clients, num_classes, dim))
    bias = u[:, None] + rng.standard_normal((num_clients, num_classes))
    v = centre[:, None] + rng.standard_normal((num_clients, dim))
    owner = np.repeat(np.arange(num_clients), drawn)
    # The variances are j^-1.2, so the standard deviations are j^-0.6.
    x = v[owner] + np.arange(1, dim + 1) ** -0.6 * rng.standard_normal((len(owner), dim))
    clients = np.split(x, np.cumsum(drawn)[:-1])
    y = np.concatenate([np.argmax(mine @ w.T + b, axis=1) for mine, w, b in zip(clients, weight, bias, strict=True)])
    views = train_test_views(drawn, train=train, support=support)
    return from_partition(x.astype(np.float32), y, np.arange(len(y)), drawn, num_classes=num_classes, views=views)


def linear_regression(
    num_clients: int,
    *,
    seed: int | np.random.Generator,
    dim: int = 5,
    size: int = 40,
    spread: float = 1.0,
    noise: float = 0.1,
) -> FederatedData:
    """Clients with linear targets y = x·w_i + noise, w_i ~ N(1, spread²), and inputs that each client scales differently.

    `quadratics` gives the clients' exact objectives on any view. Sizes differ (`size` to 2 `size`), so that weighting clients
    by samples and weighting them equally lead to different optima.

    Args:
      num_clients: N.
      seed: an integer or a NumPy generator.
      dim: d.
      size: samples of the smallest client.
      spread: standard deviation of the clients' coefficients around 1.
      noise: standard deviation of the noise in the targets.

    Returns:
      Float64 inputs `[S, d]` and targets `[S]`, with the views of `train_test_views`.

    Example:
      >>> data = linear_regression(3, seed=0, noise=0.0)
      >>> own = optimum(quadratics(data, "train"), weight=[1, 0, 0])
      >>> np.allclose(own, optimum(quadratics(data, "test"), weight=[1, 0, 0]))
      True
    """
    checks.count("num_clients", num_clients)
    checks.count("dim", dim)
    checks.count("size", size, least=8)
    checks.not_negative("spread", spread)
    checks.not_negative("noise", noise)
    checks.seed("seed", seed)
    rng = np.random.default_rng(seed)
    sizes = rng.integers(size, 2 * size + 1, num_clients)
    owner = np.repeat(np.arange(num_clients), sizes)
    coefficients = 1 + spread * rng.standard_normal((num_clients, dim))
    x = rng.uniform(0.5, 1.5, (num_clients, dim))[owner] * rng.standard_normal((len(owner), dim))
    y = (x * coefficients[owner]).sum(1) + noise * rng.standard_normal(len(owner))
    return from_partition(x, y, np.arange(len(y)), sizes, num_classes=0, views=train_test_views(sizes))


def sinusoids(
    num_clients: int, *, seed: int | np.random.Generator, size: int = 40, noise: float = 0.0
) -> tuple[FederatedData, np.ndarray, np.ndarray]:
    """Few-shot sinusoid regression (Finn, Abbeel, Levine, ICML 2017).

    A client has y = a sin(x - p) with a ~ U(0.1, 5), p ~ U(0, π) and x ~ U(-5, 5). In the features (sin x, cos x) this is a
    linear regression, so `quadratics(..., features=sinusoid_features)` gives exact objectives for a linear head. The best
    single function over infinitely many clients is `sinusoid_mean`.

    Args:
      num_clients: N.
      seed: an integer or a NumPy generator.
      size: samples of each client.
      noise: standard deviation of the noise in the targets.

    Returns:
      Clients with inputs `[S, 1]`, targets `[S]` and the views of `train_test_views`; the amplitudes `[N]`; the phases `[N]`.
    """
    checks.count("num_clients", num_clients)
    checks.count("size", size, least=8)
    checks.not_negative("noise", noise)
    checks.seed("seed", seed)
    rng = np.random.default_rng(seed)
    amplitude, phase = rng.uniform(0.1, 5, num_clients), rng.uniform(0, np.pi, num_clients)
    x = rng.uniform(-5, 5, (num_clients, size))
    y = amplitude[:, None] * np.sin(x - phase[:, None]) + noise * rng.standard_normal(x.shape)
    sizes = np.full(num_clients, size)
    data = from_partition(
        x.reshape(-1, 1),
        y.ravel(),
        np.arange(x.size),
        sizes,
        num_classes=0,
        views=train_test_views(sizes, train=0.5, support=0.5),
    )
    return data, amplitude, phase


def sinusoid_features(x: ArrayLike) -> np.ndarray:
    """The features (sin x, cos x) `[S, 2]` of inputs `[S, 1]`; a sin(x - p) has the coefficients (a cos p, -a sin p)."""
    x = np.asarray(x)
    return np.concatenate([np.sin(x), np.cos(x)], axis=-1)


def sinusoid_mean(x: ArrayLike) -> np.ndarray:
    """The expectation of a sin(x - p) over the clients of `sinusoids`: -E[a] E[sin p] cos x = -(5.1 / π) cos x."""
    return -(5.1 / np.pi) * np.cos(np.asarray(x))


class Quadratics(NamedTuple):
    """Each client's loss, the mean of ½ (x·w - y)² over its samples, as ½ wᵀ H w - bᵀ w + c.

    Attributes:
      hessian: H, float64 `[N, d, d]`.
      linear: b, float64 `[N, d]`.
      constant: c, float64 `[N]`.
      size: samples of each client, int64 `[N]`.
    """

    hessian: np.ndarray
    linear: np.ndarray
    constant: np.ndarray
    size: np.ndarray

    def loss(self, w: ArrayLike) -> np.ndarray:
        """Float64 `[N]`: each client's loss at `w [d]` or `[N, d]`."""
        w = np.broadcast_to(np.asarray(w, np.float64), self.linear.shape)
        return 0.5 * np.einsum("ni,nij,nj->n", w, self.hessian, w) - (self.linear * w).sum(1) + self.constant

    def gradient(self, w: ArrayLike) -> np.ndarray:
        """Float64 `[N, d]`: each client's gradient H w - b at `w [d]` or `[N, d]`."""
        w = np.broadcast_to(np.asarray(w, np.float64), self.linear.shape)
        return np.einsum("nij,nj->ni", self.hessian, w) - self.linear


def quadratics(data: FederatedData, view: str, *, features: Callable[[ArrayLike], np.ndarray] = np.asarray) -> Quadratics:
    """The exact objectives of linear regression on one view: H = XᵀX / n, b = Xᵀy / n, c = yᵀy / 2n.

    Args:
      data: clients with real targets `[S]`.
      view: name of the view.
      features: `inputs [S, ...] -> X [S, d]`, of inputs as a batch has them.

    Raises:
      ValueError: inputs or targets that are no such arrays.
    """
    checks.instance("data", data, FederatedData, "linear_regression(3, seed=0)")
    sizes, start = np.asarray(data.sizes(view), np.int64), np.asarray(data.start[view])
    one_array("linear regression needs inputs", data.x)
    one_array("linear regression needs targets", data.y)
    inputs = np.asarray(data.x)
    if data.offset is not None:  # as a batch has them
        inputs = (inputs - np.asarray(data.offset)) * np.asarray(data.scale)
    x, y = np.asarray(features(inputs), np.float64), np.asarray(data.y, np.float64)
    if y.ndim != 1 or x.ndim != 2:
        raise ValueError(f"linear regression needs features [S, d] and targets [S], not {list(x.shape)} and {list(y.shape)}")
    mine = [slice(a, a + n) for a, n in zip(start, sizes, strict=True)]
    return Quadratics(
        np.stack([x[s].T @ x[s] / n for s, n in zip(mine, sizes, strict=True)]),
        np.stack([x[s].T @ y[s] / n for s, n in zip(mine, sizes, strict=True)]),
        np.array([y[s] @ y[s] / (2 * n) for s, n in zip(mine, sizes, strict=True)]),
        sizes,
    )


def optimum(losses: Quadratics, *, weight: ArrayLike | None = None) -> np.ndarray:
    """Float64 `[d]`: the minimum of the clients' mean loss with weights `weight [N]`, the number of samples if not given."""
    weight = np.asarray(losses.size if weight is None else weight, np.float64)
    return np.linalg.solve(np.einsum("n,nij->ij", weight, losses.hessian), weight @ losses.linear)


def meta_gradient(w: ArrayLike, support: Quadratics, query: Quadratics, *, inner_lr: float, steps: int = 1) -> np.ndarray:
    """Float64 `[N, d]`: each client's exact MAML gradient at `w [d]` (Finn, Abbeel, Levine, ICML 2017).

    After k full-batch steps the adapted model is P w + r with P = (I - αH_s)^k and r = Σ_{j<k} (I - αH_s)^j α b_s, so the
    gradient of the query loss is P (H_q (P w + r) - b_q); P is symmetric.
    """
    power, shift = _adaptation(support, inner_lr, steps)
    adapted = np.einsum("nij,nj->ni", power, np.broadcast_to(np.asarray(w, np.float64), shift.shape)) + shift
    return np.einsum("nij,nj->ni", power, query.gradient(adapted))


def meta_optimum(
    support: Quadratics, query: Quadratics, *, inner_lr: float, steps: int = 1, weight: ArrayLike | None = None
) -> np.ndarray:
    """Float64 `[d]`: the zero of the clients' mean `meta_gradient` with weights `weight [N]`, by default the query samples."""
    power, shift = _adaptation(support, inner_lr, steps)
    weight = np.asarray(query.size if weight is None else weight, np.float64)
    matrix = np.einsum("n,nij,njk,nkl->il", weight, power, query.hessian, power, optimize=True)
    return np.linalg.solve(matrix, -np.einsum("n,nij,nj->i", weight, power, query.gradient(shift), optimize=True))


def _adaptation(support: Quadratics, inner_lr: float, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """P `[N, d, d]` and r `[N, d]` of `meta_gradient`."""
    checks.not_negative("inner_lr", inner_lr)
    checks.count("steps", steps, least=0)
    step = np.eye(support.linear.shape[1]) - inner_lr * support.hessian
    power, shift = np.broadcast_to(np.eye(step.shape[-1]), step.shape), np.zeros_like(support.linear)
    for _ in range(steps):
        shift = np.einsum("nij,nj->ni", step, shift) + inner_lr * support.linear
        power = step @ power
    return power, shift
