"""The equations of this folder against PyTorch, whose own behaviour some of them rest on. Long: it needs torch.

A whole round is: PyTorch's step here = the NumPy of this folder = the library, which the other files compare.
"""

import numpy as np
import pytest

from tests.authors import normed
from tests.authors.source import differs
from tests.authors.test_own_models import clipped
from tests.whole_rounds import world
from tests.whole_rounds.test_fedpac import PULL, pulled_gradient
from tests.whole_rounds.test_losses import TEMPERATURE, WEIGHT, contrast_gradient
from tests.whole_rounds.world import BODY, CLASSES, HEAD, NOTHING, cut, momentum_sgd, near, view

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.long
BATCHES = cut(view(2, "train"), 4)[:-1] + cut(view(0, "train"), 4)
START = np.sin(np.arange(27.0))
RATE = 0.1


def tensor(array):
    return torch.tensor(np.asarray(array, float), dtype=torch.float64)


class Small(torch.nn.Module):
    """The network of `world`: tanh(x A) W + b."""

    def __init__(self, w):
        super().__init__()
        body, bias, head = world.unpack(w)
        self.body = torch.nn.Parameter(tensor(body))
        self.bias = torch.nn.Parameter(tensor(bias))
        self.head = torch.nn.Parameter(tensor(head))

    def features(self, x):
        return torch.tanh(x @ self.body)

    def forward(self, x):
        return self.features(x) @ self.head + self.bias

    def flat(self):
        return world.pack(*(p.detach().numpy() for p in (self.body, self.bias, self.head)))


def train(model, optimizer, batches, loss=None, clip=None, set_to_none=True):
    for batch in batches:
        optimizer.zero_grad(set_to_none=set_to_none)
        x, y = tensor(batch[0]), torch.tensor(batch[1], dtype=torch.long)
        value = torch.nn.functional.cross_entropy(model(x), y)
        (value if loss is None else value + loss(model, x, y)).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return model.flat()


@pytest.mark.parametrize(("momentum", "decay"), [(0.5, 5e-4), (0.9, 1e-5), (0.5, 0.0), (0.9, 1e-3)])
def test_sgd_with_momentum_and_decay(momentum, decay):
    model = Small(START)
    sgd = torch.optim.SGD(model.parameters(), lr=RATE, momentum=momentum, weight_decay=decay)
    near(train(model, sgd, BATCHES), momentum_sgd(START, RATE, BATCHES, ~NOTHING, momentum=momentum, decay=decay), 1e-12)


def test_the_two_phases_of_fedpac():
    """A new optimiser for each phase, over the parameters that `requires_grad` leaves."""
    model, targets = Small(START), np.cos(np.arange(12.0)).reshape(3, 4)
    model.body.requires_grad = False
    head = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=RATE, momentum=0.5, weight_decay=5e-4)
    train(model, head, BATCHES)
    for p in model.parameters():
        p.requires_grad = not p.requires_grad
    body = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=RATE, momentum=0.5, weight_decay=5e-4)

    def pull(model, x, y):
        return PULL * torch.nn.functional.mse_loss(tensor(targets)[y], model.features(x))

    got = train(model, body, BATCHES, pull)
    w = momentum_sgd(START, RATE, BATCHES, HEAD, momentum=0.5, decay=5e-4)
    near(got, momentum_sgd(w, RATE, BATCHES, BODY, pulled_gradient(targets), momentum=0.5, decay=5e-4), 1e-12)


@pytest.mark.parametrize("set_to_none", [True, False], ids=["PyTorch 2", "before"])
def test_the_one_optimiser_of_fedrep(set_to_none):
    """One SGD for both phases, gradients switched on and off by `requires_grad`.

    In PyTorch 2 `zero_grad` removes a gradient, and the head rests while the body trains, as in the paper. Before, it filled it
    with zeros, and the head went on by its momentum and its weight decay through the whole body phase.
    """
    model = Small(START)
    groups = [
        {"params": [model.body, model.head], "weight_decay": 1e-4},
        {"params": [model.bias], "weight_decay": 0},
    ]
    sgd = torch.optim.SGD(groups, lr=RATE, momentum=0.5)
    model.body.requires_grad = False
    train(model, sgd, BATCHES, set_to_none=set_to_none)
    for p in model.parameters():
        p.requires_grad = not p.requires_grad
    got = train(model, sgd, BATCHES, set_to_none=set_to_none)
    weights = world.pack(np.ones((3, 4)), np.zeros(3), np.ones((4, 3))) > 0

    def slope(w, batch):
        return world.gradient(w, batch) + 1e-4 * np.where(weights, w, 0)

    expected = momentum_sgd(momentum_sgd(START, RATE, BATCHES, HEAD, slope), RATE, BATCHES, BODY, slope)
    if set_to_none:
        near(got, expected, 1e-12)
    else:
        differs(got[HEAD], expected[HEAD], 0.005)


def test_the_contrast_of_moon():
    towards, away, w = (np.cos(np.arange(27.0) + shift) for shift in (0, 1, 2))
    fixed, model = [Small(towards), Small(away)], Small(w)
    x, y = view(0, "train")
    cosine = torch.nn.CosineSimilarity(dim=-1)
    z = model.features(tensor(x))
    logits = torch.stack([cosine(z, other.features(tensor(x)).detach()) for other in fixed], 1) / TEMPERATURE
    (WEIGHT * torch.nn.functional.cross_entropy(logits, torch.zeros(len(y), dtype=torch.long))).backward()
    near(model.body.grad.numpy().ravel(), contrast_gradient(w, (x, y), towards, away)[BODY], 1e-12)


@pytest.mark.parametrize("most", [50.0, 0.05])
def test_clipping(most):
    """The inner loop of pFedHN: PyTorch divides by the norm + 1e-6."""
    model = Small(START)
    sgd = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9, weight_decay=5e-5)
    w = momentum_sgd(
        START, RATE, BATCHES, ~NOTHING, lambda w, b: clipped(world.gradient(w, b), most), momentum=0.9, decay=5e-5
    )
    near(train(model, sgd, BATCHES, clip=most), w, 1e-12)


class Normed(torch.nn.Module):
    """The network of `normed`."""

    def __init__(self, w):
        super().__init__()
        mean, var, shift, scale, b1, k1, b2, k2 = (tensor(part) for part in normed.unpack(w))
        self.fc1, self.bn1, self.out = torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, CLASSES)
        self.double()
        with torch.no_grad():
            pairs = [(self.bn1.bias, shift), (self.bn1.weight, scale), (self.fc1.bias, b1), (self.fc1.weight, k1)]
            pairs += [(self.out.bias, b2), (self.out.weight, k2), (self.bn1.running_mean, mean), (self.bn1.running_var, var)]
            for mine, given in pairs:
                mine.copy_(given)

    def forward(self, x):
        return self.out(torch.nn.functional.elu(self.bn1(self.fc1(x))))

    def flat(self):
        bn, fc, out = self.bn1, self.fc1, self.out
        leaves = (bn.running_mean, bn.running_var, bn.bias, bn.weight, fc.bias, fc.weight, out.bias, out.weight)
        return normed.pack(*(leaf.detach().numpy() for leaf in leaves))


NORMED_START = np.abs(np.sin(np.arange(47.0))) + 0.1
NORMED_BATCHES = cut(view(2, "train"), 6) + cut(view(0, "train"), 6)


def test_batch_norm_in_training_mode():
    """Biased variance in the forward pass, unbiased in the running one, which moves by 0.1."""
    model = Normed(NORMED_START)
    got = train(model, torch.optim.SGD(model.parameters(), lr=RATE), NORMED_BATCHES)
    near(got, normed.descend(NORMED_START, RATE, NORMED_BATCHES), 1e-12)


def test_a_batch_of_one_sample_is_refused():
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        Normed(NORMED_START)(torch.ones(1, 3, dtype=torch.float64))


def test_adam_that_goes_on_from_averaged_slots():
    """m, v and a step count that is no integer, put into the state of torch.optim.Adam, as MTFL's client does."""
    model, (m, v, t) = Normed(NORMED_START), (0.1 * np.cos(np.arange(47.0)), 0.01 + np.zeros(47), 5.3)
    adam = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-7)
    train(model, adam, NORMED_BATCHES[:1])
    model.load_state_dict(Normed(NORMED_START).state_dict())
    of = [model.bn1.bias, model.bn1.weight, model.fc1.bias, model.fc1.weight, model.out.bias, model.out.weight]
    for p, first, second in zip(of, normed.unpack(m)[2:], normed.unpack(v)[2:], strict=True):
        adam.state[p]["step"].fill_(t)
        adam.state[p]["exp_avg"].copy_(tensor(first))
        adam.state[p]["exp_avg_sq"].copy_(tensor(second))
    got, w, t = train(model, adam, NORMED_BATCHES), NORMED_START, np.float32(t).astype(float)
    for batch in NORMED_BATCHES:
        g, w = normed.step(w, batch)
        t, m, v = t + 1, 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        w = w - 0.01 * np.where(normed.STATISTICS, 0, m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.999**t)) + 1e-7))
    # PyTorch keeps the count in float32.
    near(got, w, 1e-6)
