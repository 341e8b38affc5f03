"""Methods whose clients keep or get a whole model of their own: Ditto, pFedMe, APFL, FedFomo, FedEM, pFedHN."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedjax_meta as fm
from tests.authors.source import differs, written_from
from tests.whole_rounds.test_losses import RATE as FEDEM_RATE
from tests.whole_rounds.world import (
    COHORTS,
    KEY,
    KNOWN,
    LATE,
    NEW,
    NOTHING,
    TRAIN,
    Library,
    N,
    agree,
    data,
    descend,
    endless,
    epochs,
    flat,
    flat_rows,
    gradient,
    loss,
    momentum_sgd,
    near,
    order_key,
    pack,
    probabilities,
    task,
    two_rounds,
    unpack,
    view,
)

RATE, BATCH = 0.15, 4


def order(round_, i, count=2, name="train"):
    return epochs(order_key(round_, i), i, name, BATCH, count)


@written_from(
    "litian96/ditto",
    "26d9b29",
    "flearn/trainers_MTL/ditto.py:85-129",
    "flearn/trainers_MTL/ditto.py:164-169",
    "flearn/trainers_MTL/fedbase.py:139-149",
    "flearn/models/fmnist/cnn.py:120-127",
)
def test_ditto():
    """On each batch v moves first, then w, at one rate; v is pulled to the model that was sent. Clients count equally."""
    pull = 1.5
    library = Library(fm.ditto(task(), lr=RATE, prox_weight=pull, epochs=2, batch_size=BATCH, weighting="uniform"))

    def client(round_, i, sent, v):
        w, v = sent, sent if v is None else v
        for batch in order(round_, i):
            v = v - RATE * (gradient(v, batch) + pull * (v - sent))
            w = w - RATE * gradient(w, batch)
        return w, v

    agree(library, two_rounds(library.w, client, [1] * N), blank=0 * library.w)


# ------------------------------------------------------------------------------------------------------------------- pFedMe


PFEDME = {"lr": 0.04, "outer_lr": 0.03, "prox_weight": 6.0, "inner_steps": 3, "local_rounds": 5, "weight_decay": 1e-3}


def pfedme_client(keeps):
    """theta <- theta - rate (g + lambda (theta - w_i) + mu theta), K times; then w_i <- w_i - lambda eta (w_i - theta)."""

    def client(round_, i, sent, memory):
        theta, own = sent, memory if keeps and memory is not None else sent
        for batch in endless(order_key(round_, i), i, "train", BATCH, PFEDME["local_rounds"]):
            for _ in range(PFEDME["inner_steps"]):
                step = gradient(theta, batch) + PFEDME["prox_weight"] * (theta - own) + PFEDME["weight_decay"] * theta
                theta = theta - PFEDME["lr"] * step
            own = own - PFEDME["prox_weight"] * PFEDME["outer_lr"] * (own - theta)
        return own, own

    return client


@written_from(
    "CharlieDinh/pFedMe",
    "caf24b1",
    "FLAlgorithms/users/userpFedMe.py:36-60",
    "FLAlgorithms/optimizers/fedoptimizer.py:49-65",
    "FLAlgorithms/users/userbase.py:57-59",
    "FLAlgorithms/users/userbase.py:95-107",
    "FLAlgorithms/servers/serverbase.py:107-125",
)
def test_pfedme():
    """The server steps by beta towards the mean weighted by samples, and what is tested as theta is w_i (see the long test)."""
    beta = 0.7
    library = Library(fm.pfedme(task(), **PFEDME, batch_size=BATCH, weighting="samples", tests="local"), server_lr=beta)
    after = two_rounds(library.w, pfedme_client(keeps=False), TRAIN, server_lr=beta)
    agree(library, after, blank=0 * library.w)
    w, _, local = after[-1]
    for i in (KNOWN, LATE):
        near(library.tested(i), local[i])
    near(library.tested(NEW), w)


@written_from("JedMills/MTFL-For-Personalised-DNNs", "b466822", "fl_algs.py:344-377", "optimisers.py:106-115")
def test_pfedme_in_the_code_of_mtfl():
    """w_i is never reset to the server's model; all of it is interpolated, and w_i is tested."""
    library = Library(fm.pfedme(task(), **PFEDME, batch_size=BATCH, weighting="samples", keep_local=True), server_lr=0.7)
    after = two_rounds(library.w, pfedme_client(keeps=True), TRAIN, server_lr=0.7)
    w, _, local = after[0]
    near(flat(library.first.model), w)
    near(library.tested(KNOWN, library.first), local[KNOWN])
    # Client 1 joins in the second round: there its w_i is w^0, here it is the server's model.
    near(library.tested(KNOWN), after[1][2][KNOWN])


@pytest.mark.long
def test_the_list_of_theta_is_the_list_of_the_model():
    """In PyTorch: a step returns `group["params"]`, the model's own tensors, and w_i is then copied into these."""
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(2, 1, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    local = [p.detach().clone() for p in model.parameters()]
    model(torch.ones(3, 2, dtype=torch.float64)).square().mean().backward()
    optimizer.step()
    theta = optimizer.param_groups[0]["params"]
    assert not torch.equal(theta[0].data, local[0])
    for p, w in zip(model.parameters(), local, strict=True):
        p.data = w.clone()
    assert all(torch.equal(t.data, w) for t, w in zip(theta, local, strict=True))


# --------------------------------------------------------------------------------------------------------------------- APFL


def mixed_outputs_gradient(v, w, alpha, batch):
    """Gradients with respect to v and w of the loss of alpha f(v, x) + (1 - alpha) f(w, x)."""
    x, y = batch
    logits = alpha * np.log(probabilities(v, x)) + (1 - alpha) * np.log(probabilities(w, x))
    p = np.exp(logits - logits.max(1, keepdims=True))
    dl = (p / p.sum(1, keepdims=True) - np.eye(3)[y]) / len(y)

    def back(model, share):
        body, _, head = unpack(model)
        z = np.tanh(x @ body)
        return pack(x.T @ (share * dl @ head.T * (1 - z**2)), share * dl.sum(0), z.T @ (share * dl))

    return back(v, alpha), back(w, 1 - alpha)


def apfl_client(share, in_turn, adapts):
    """In turn: w moves, then v at the new w, and after the first batch alpha by their rule. Else both from before the step."""

    def client(round_, i, w, memory):
        v, alpha = (w, share) if memory is None else (memory[:-1], memory[-1])
        for number, batch in enumerate(order(round_, i)):
            moved = w - RATE * gradient(w, batch)
            of_v, of_w = mixed_outputs_gradient(v, moved if in_turn else w, alpha, batch)
            w, v = moved, v - RATE * of_v
            if adapts and number == 0:
                slope = (v - w) @ (alpha * of_v + (1 - alpha) * of_w) + 0.02 * alpha
                alpha = np.clip(alpha - RATE * slope, 0, 1)
        return w, np.r_[v, alpha]

    return client


APFL_CODE = written_from(
    "MLOPTPSU/FedTorch",
    "ab8068d",
    "fedtorch/comms/trainings/federated/centered/apfl.py:87-117",
    "fedtorch/comms/utils/eval.py:31-39",
    "fedtorch/comms/algorithms/federated/centered/fedavg.py:15-46",
    "fedtorch/comms/utils/flow_utils.py:240-250",
)


@pytest.mark.parametrize("adapts", [False, True], ids=["fixed alpha", "adaptive alpha"])
@APFL_CODE
def test_apfl(adapts):
    library = Library(
        fm.apfl_outputs(
            task(), lr=RATE, share=0.4, share_lr=RATE if adapts else 0.0, epochs=2, batch_size=BATCH, steps="in_turn"
        )
    )
    after = two_rounds(library.w, apfl_client(0.4, True, adapts), [1] * N)
    agree(library, after, blank=np.zeros(28))


@APFL_CODE
def test_apfl_of_the_paper_takes_both_steps_from_the_same_point():
    library = Library(fm.apfl_outputs(task(), lr=RATE, share=0.4, share_lr=0.0, epochs=2, batch_size=BATCH))
    after = two_rounds(library.w, apfl_client(0.4, False, False), [1] * N)
    agree(library, after, blank=np.zeros(28))
    in_turn = two_rounds(library.w, apfl_client(0.4, True, False), [1] * N)
    differs(in_turn[-1][2][KNOWN], after[-1][2][KNOWN], 0.005)


# ------------------------------------------------------------------------------------------------------------------ FedFomo


@pytest.mark.parametrize(("distance", "length"), [("absolute", lambda d: np.sum(np.abs(d))), ("squared", lambda d: d @ d)])
@written_from(
    "NVlabs/FedFomo",
    "fe04f66",
    "federation.py:152-184",
    "federation.py:361-377",
    "federation.py:421-459",
    "federation.py:523-555",
    "federated/utils.py:143-176",
    "server.py:170-171",
)
def test_fedfomo(distance, length):
    """theta + sum_n w_n (theta_n - theta) / sum of the positive w, theta the client's model from before the round's training."""
    options = {"lr": RATE, "epochs": 2, "batch_size": BATCH, "distance": distance, "exploration": 0.0}
    library = Library(fm.fedfomo(task(), **options))
    own = np.tile(library.w, (N, 1))
    for number, state in enumerate((library.first, library.last)):
        cohort = COHORTS[number]
        trained = {i: descend(own[i], RATE, order(number, i, name="query")) for i in cohort}
        mixed = {}
        for i in cohort:
            held_out, before = view(i, "support"), own[i]
            weight = {n: (loss(before, held_out) - loss(w, held_out)) / length(w - before) for n, w in trained.items()}
            positive = {n: value for n, value in weight.items() if value > 0}
            total = sum(positive.values())
            mixed[i] = before + sum(value / total * (trained[n] - before) for n, value in positive.items())
        for i in cohort:
            own[i] = mixed[i]
        near(flat_rows(state.personal), own)


# -------------------------------------------------------------------------------------------------------------------- FedEM


@written_from(
    "omarfoq/FedEM",
    "996fadd",
    "client.py:91-116",
    "client.py:156-162",
    "learners/learner.py:173-194",
    "utils/optim.py:156-162",
    "aggregator.py:110-116",
    "aggregator.py:293-304",
)
def test_fedem():
    """One round: with momentum 0.9 and decay 5e-4; the server's mean is over ALL clients, those that are not sampled at w^t.

    That is the mean of the cohort at the server's rate (samples of the cohort) / (all samples). Their optimisers live as long
    as their clients, so that from its second round on a client goes on with its momentum, which here starts afresh.
    """
    count, rate, cohort = 3, FEDEM_RATE, COHORTS[0]
    share = sum(TRAIN[i] for i in cohort) / sum(TRAIN)
    sgd = lambda rate: optax.chain(optax.add_decayed_weights(5e-4), optax.sgd(rate, momentum=0.9))  # noqa: E731
    method = fm.fedem(task(), components=count, lr=rate, epochs=2, batch_size=BATCH, optimizer=sgd)
    library = Library(method, server_lr=share)
    start = [flat(jax.tree.map(lambda leaf, m=m: leaf[m], library.start.model)) for m in range(count)]
    clients = np.tile(np.stack(start)[None], (N, 1, 1))
    for i in cohort:
        x, y = view(i, "train")
        losses = np.stack([-np.log(probabilities(w, x)[np.arange(len(y)), y]) for w in start], 1)
        q = np.exp(np.log(1 / count) - losses)
        q = q / q.sum(1, keepdims=True)
        near(flat_rows(library.first.memory)[i], q.mean(0))

        def of_batch(batch, x=x, q=q):
            """The weights that were stored for the samples of a batch."""
            return q[[np.flatnonzero((x == row).all(1))[0] for row in batch[0]]]

        for m in range(count):
            slope = lambda w, batch, m=m: gradient(w, batch, of_batch(batch)[:, m])  # noqa: E731
            clients[i, m] = momentum_sgd(start[m], rate, order(0, i), ~NOTHING, slope, momentum=0.9, decay=5e-4)
    mean = np.average(clients, 0, TRAIN)
    for m in range(count):
        near(flat(jax.tree.map(lambda leaf, m=m: leaf[m], library.first.model)), mean[m])


# ------------------------------------------------------------------------------------------------------------------- pFedHN


def hyper_forward(hyper, v):
    """(activations, generated leaves): a trunk of dense layers with ReLU between them, and a dense layer for each leaf."""
    h, inputs = v, []
    for number, layer in enumerate(hyper["trunk"]):
        inputs.append(h)
        h = layer["kernel"] @ (h if number == 0 else np.maximum(h, 0)) + layer["bias"]
    return inputs, h, [layer["kernel"] @ h + layer["bias"] for layer in hyper["leaves"]]


def hyper_gradient(hyper, v, deltas):
    """(gradient with respect to the hypernetwork, and to v) of sum of <generated, delta>."""
    inputs, h, _ = hyper_forward(hyper, v)
    leaves = [{"kernel": np.outer(d, h), "bias": d} for d in deltas]
    back = sum(layer["kernel"].T @ d for layer, d in zip(hyper["leaves"], deltas, strict=True))
    trunk = []
    for number, layer in reversed(list(enumerate(hyper["trunk"]))):
        given = inputs[number] if number == 0 else np.maximum(inputs[number], 0)
        trunk.append({"kernel": np.outer(back, given), "bias": back})
        back = layer["kernel"].T @ back * (1 if number == 0 else inputs[number] > 0)
    return {"trunk": trunk[::-1], "leaves": leaves}, back


def clipped(g, most):
    """PyTorch's clip_grad_norm_, whose divisor is the norm + 1e-6."""
    return g * min(1, most / (np.linalg.norm(g) + 1e-6))


@pytest.mark.parametrize("clip", [50.0, 0.05], ids=["as published", "a clip that acts"])
@written_from(
    "AvivSham/pFedHN",
    "1bc0549",
    "experiments/pfedhn/trainer.py:96-104",
    "experiments/pfedhn/trainer.py:125-181",
    "experiments/pfedhn/models.py:17-69",
)
def test_pfedhn(clip):
    """One client a round: its weights are generated, train by SGD (0.9, 5e-5), and what they moved is pulled back."""
    rate, eta, steps = 0.1, 0.05, 4
    method = fm.pfedhn(
        task(), lr=rate, server_lr=eta, embedding_size=3, width=6, hidden=1, local_steps=steps, batch_size=BATCH, clip=clip
    )
    algorithm = fm.federate(method, fm.Federation(cohort_size=1, devices=1, schedule=lambda *a: jnp.asarray([2])))
    state, one_round = jax.jit(algorithm.init)(KEY, data()), jax.jit(algorithm.round)
    # The first round draws the embedding; those after it are compared.
    state, _ = one_round(jax.random.fold_in(KEY, 0), state, data())
    velocity, sizes = None, [12, 3, 12]
    server_slots = jax.tree.leaves(state.optimizer)
    for number in (1, 2):
        hyper = jax.tree.map(np.asarray, state.model.hyper)
        memory = jax.tree.map(lambda leaf: np.asarray(leaf[2]), state.memory)
        v, w = memory.value, np.concatenate(hyper_forward(hyper, memory.value)[2])
        theta, buffer = w, 0
        for batch in endless(order_key(number, 2), 2, "train", BATCH, steps):
            buffer = 0.9 * buffer + clipped(gradient(theta, batch), clip) + 5e-5 * theta
            theta = theta - rate * buffer
        of_hyper, of_v = hyper_gradient(hyper, v, np.split(w - theta, np.cumsum(sizes)[:-1]))
        both = clipped(np.r_[flat(of_hyper), of_v], clip)
        start = np.r_[flat(hyper), v]
        if velocity is None:
            velocity = np.concatenate([np.ravel(leaf) for leaf in [*server_slots, *jax.tree.leaves(memory.slots)]])
        velocity = 0.9 * velocity + both + 1e-3 * start
        state, _ = one_round(jax.random.fold_in(KEY, number), state, data())
        moved = np.r_[flat(state.model.hyper), np.asarray(state.memory.value[2])]
        # optax divides by the norm itself, PyTorch by the norm + 1e-6.
        near(moved, start - eta * velocity, 1e-5 if clip < 1 else 1e-9)


@pytest.mark.parametrize("clip", [50.0, 0.05], ids=["as published", "a clip that acts"])
@written_from(
    "AvivSham/pFedHN",
    "1bc0549",
    "experiments/pfedhn_pc/node.py:25-30",
    "experiments/pfedhn_pc/trainer.py:136-139",
    "experiments/pfedhn_pc/trainer.py:156-191",
)
def test_pfedhn_pc(clip):
    """The body is generated, and its gradients are clipped; the head is the client's own, and its momentum goes on."""
    rate, eta, steps = 0.1, 0.05, 4
    options = {"lr": rate, "server_lr": eta, "embedding_size": 3, "width": 6, "hidden": 1, "local_steps": steps}
    method = fm.pfedhn_pc(task(), batch_size=BATCH, clip=clip, keep_optimizer=True, **options)
    algorithm = fm.federate(method, fm.Federation(cohort_size=1, devices=1, schedule=lambda *a: jnp.asarray([2])))
    state, one_round = jax.jit(algorithm.init)(KEY, data()), jax.jit(algorithm.round)
    body, velocity, of_head = slice(0, 12), 0, 0
    for number in (0, 1, 2):
        before = jax.tree.map(np.asarray, state)
        state, _ = one_round(jax.random.fold_in(KEY, number), state, data())
        head = flat_rows(before.personal)[2] if number else flat(before.model.own)
        # The first round draws the embedding, so that what a head of that round begins with is not known.
        if not number:
            of_head = flat(jax.tree.map(lambda leaf: np.asarray(leaf[2]), state.memory.momentum))
            velocity = np.concatenate([flat(state.optimizer), flat(jax.tree.map(lambda leaf: leaf[2], state.memory.slots))])
            continue
        hyper, v = before.model.hyper, before.memory.value[2]
        theta = np.concatenate([*hyper_forward(hyper, v)[2], head])
        sent, buffer = theta[body].copy(), 0
        for batch in endless(order_key(number, 2), 2, "train", BATCH, steps):
            g = gradient(theta, batch)
            buffer = 0.9 * buffer + clipped(g[body], clip) + 5e-5 * theta[body]
            of_head = 0.9 * of_head + g[12:] + 5e-5 * theta[12:]
            theta = theta - rate * np.concatenate([buffer, of_head])
        of_hyper, of_v = hyper_gradient(hyper, v, [sent - theta[body]])
        start = np.r_[flat(hyper), v]
        velocity = 0.9 * velocity + clipped(np.r_[flat(of_hyper), of_v], clip) + 1e-3 * start
        tolerance = 1e-5 if clip < 1 else 1e-9
        near(np.r_[flat(state.model.hyper), np.asarray(state.memory.value[2])], start - eta * velocity, tolerance)
        near(flat_rows(state.personal)[2], theta[12:], tolerance)
