"""A small model whose workers do to themselves what the environment says, at an exact place.

`FAULTS` is a JSON list of {"slot", "incarnation", "step", "where", "what"}.

- `where`: "data" (while a shard is read), "shard" (on the device, after a shard was dispatched), "gather" (before the
  first collective of an epoch), "exchange" (in place of taking part in it), "barrier" (after the exchange, before the
  barrier), "heal" (in a transfer), "stripe" (when a part of one has arrived), "healed" (a receiver, after it), "update"
  (after the update), "hook" (after a commit), "evaluate" (while evaluation data is read), "length" (of a source) or
  "start".
- `what`: "kill", "die" (all workers may: an exit without a traceback), "raise", "other" (as "raise", another type),
  "exit" (sys.exit), "interrupt" (KeyboardInterrupt), "deadlock" (a lock that is never released), "hold" (C code that
  keeps the interpreter's lock), "slow" (for "seconds"), "endless" (where "shard": a kernel), "nan" (where "data": the
  sample is not finite) or "flip" (where "healed" or "update": one bit of one parameter).

`step` is the number of committed steps at that moment. A slot, an incarnation or a step of -1 means any. Each fault
happens once, or every time if "always" is true; "after" says how often its place is passed before. `DISARM` names a
mechanism that this worker is to be without, so that a test can show that its tests would notice. With `NOTE_READS` the
worker's log has a line for every training sample that its source was asked for. With `QUIET` an exchange that is broken
off gives what was in its memory, as over a network on GPUs, instead of an error. `NOTE_DIGESTS` names a file that gets
a line of digests after every update: of one plain process, so that many tests have what to compare with.

`TRIPS` names a directory in which somebody may leave a fault while the job runs: a file with the slot as its name, and
such an object in it. Whoever of that slot comes to the place first takes it.
"""

import ctypes
import json
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import NamedTuple

import jax
import numpy as np
import optax
from flax import nnx

import elastic_train as et
from elastic_train.chaos import places
from elastic_train.membership import live
from elastic_train.membership.abort_cpu import GlooSockets
from elastic_train.membership.group import Fenced, Shrink, Vote
from elastic_train.membership.heal import Healer
from elastic_train.state import params_sha256, state_sha256
from elastic_train.step import reduce
from elastic_train.step.local import LocalProgram

SLOT = int(os.environ.get("ELASTIC_TRAIN_SLOT", "0"))
INCARNATION = int(os.environ.get("ELASTIC_TRAIN_INCARNATION", "0"))
NOTES_READS = "NOTE_READS" in os.environ
DIGESTS = os.environ.get("NOTE_DIGESTS")
TRIPS = os.environ.get("TRIPS", "")
pending = [
    fault
    for fault in json.loads(os.environ.get("FAULTS", "[]"))
    if fault["slot"] in (SLOT, -1) and fault.get("incarnation", 0) in (INCARNATION, -1)
]
committed = 0
LOCK = threading.Lock()
# Seconds added to every step. A job that waits for a worker to come back then takes hundreds of steps, not thousands,
# and the undisturbed run that it is compared with takes seconds.
PACE_S = float(os.environ.get("PACE_S", "0"))


def take_trip(where: str) -> None:
    """Makes the fault pending that was left for this slot at this place, if there is one."""
    slot = os.environ.get("ELASTIC_TRAIN_SLOT")  # a process that is held ready has none when it imports this
    if slot is None or not os.path.isfile(trip := os.path.join(TRIPS, slot)):
        return
    with open(trip) as file:
        fault = json.load(file)
    if fault["where"] == where:
        os.unlink(trip)
        pending.append(fault)


def strike(where: str) -> str:
    """Carries out the fault that is due here, if one is. Returns the name of what is left to do, or nothing."""
    if TRIPS:
        take_trip(where)
    for fault in list(pending):
        if fault["where"] != where or fault.get("step", -1) not in (committed, -1):
            continue
        if fault.get("after", 0) > 0:
            fault["after"] -= 1
            continue
        if not fault.get("always"):
            pending.remove(fault)
        print(f"fault: {fault} at step {committed}", flush=True)
        if fault["what"] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault["what"] == "die":
            os._exit(1)
        if fault["what"] == "exit":
            sys.exit("planned exit")
        if fault["what"] == "interrupt":
            raise KeyboardInterrupt
        if fault["what"] == "deadlock":
            with LOCK:
                LOCK.acquire()
        if fault["what"] == "hold":
            ctypes.PyDLL(None).sleep(1_000_000)
        if fault["what"] == "slow":
            time.sleep(fault["seconds"])
            continue
        if fault["what"] in ("nan", "flip", "endless", "callback"):
            return fault["what"]
        if fault["what"] == "other":
            raise LookupError(f"planned other failure on slot {SLOT}, with no UTF-8: \udcff")
        raise RuntimeError(f"planned failure in {where} at step {committed} on slot {SLOT}")
    return ""


@jax.jit
def never_ready(tree):
    """`tree`, once a loop without an end has ended."""
    count = jax.lax.while_loop(lambda count: count >= 0, lambda count: (count + 1) % 1000, 0)
    return jax.tree.map(lambda leaf: leaf + count.astype(leaf.dtype), tree)


def with_stripes(spread):
    def wrapped(self, *args):
        rows = spread(self, *args)
        strike("stripe")
        return rows

    return wrapped


@jax.jit
def fails(tree):
    """`tree`, from a program whose call back to Python raises."""
    shape = jax.ShapeDtypeStruct((), np.int32)
    nothing = jax.pure_callback(lambda: 1 // 0, shape)
    return jax.tree.map(lambda leaf: leaf + nothing.astype(leaf.dtype), tree)


def with_kernels(shard_sums):
    def wrapped(self, *args):
        sums = shard_sums(self, *args)
        what = strike("shard")
        return never_ready(sums) if what == "endless" else fails(sums) if what == "callback" else sums

    return wrapped


def flipped(params):
    """The parameters, but for one bit of the first leaf."""
    leaves, treedef = jax.tree.flatten(params)
    values = np.array(leaves[0])
    values.reshape(-1).view(np.uint8)[0] ^= 1
    return jax.tree.unflatten(treedef, [jax.device_put(values, leaves[0].sharding), *leaves[1:]])


class Strikes(places.Interference):
    """The places that this recipe does not reach by itself."""

    def at(self, where: str, role: str = "") -> None:
        if where in ("gather", "exchange", "barrier", "heal"):
            strike(where)


def disarm(mechanism: str) -> None:
    """Takes one of our own mechanisms away. The product has no switch for it."""
    match mechanism:
        case "gloo abort":
            GlooSockets.abort = lambda self, node: None
        case "vote":
            unpack = Vote.unpack
            Vote.unpack = lambda row: replace(unpack(row), ok=True)
        case "fence":
            # A member whose exchange failed while all are there goes on, as if somebody had died.
            judge = live.judge
            live.Group._await_a_death = lambda self, error: None
            live.judge = lambda view, *more: (
                Shrink(view.without(()), ()) if isinstance(verdict := judge(view, *more), Fenced) else verdict
            )
        case "gcsfs":  # the client of an object store; the command, which imports this file to check it, has it
            if "ELASTIC_TRAIN_SLOT" in os.environ:
                sys.modules["gcsfs"] = None
        case _:
            raise ValueError(mechanism)


if "QUEUE_AHEAD" in os.environ:  # as accelerators do
    LocalProgram.queues_ahead = property(lambda self: True, lambda self, value: None)


def quiet(asarray):
    """Reads the last rows anew where there are none, as if they had stayed in memory."""
    last = {}

    def wrapped(votes):
        try:
            last[votes.shape] = asarray(votes)
        except jax.errors.JaxRuntimeError as error:
            print(f"broken off without an error: {error}", flush=True)
        return last[votes.shape]

    return wrapped


if "QUIET" in os.environ:
    reduce.np = SimpleNamespace(**{**vars(np), "asarray": quiet(np.asarray)})
if "DISARM" in os.environ:
    disarm(os.environ["DISARM"])
places.install(Strikes())
reduce.Spread.__call__ = with_stripes(reduce.Spread.__call__)
LocalProgram.shard_sums = with_kernels(LocalProgram.shard_sums)
heal, update = Healer.run, LocalProgram.update


def damaging_heal(self, spread, state, donors, rank, receives):
    arrays = heal(self, spread, state, donors, rank, receives)
    if receives and strike("healed") == "flip":
        return {**arrays, "params": flipped(arrays["params"])}
    return arrays


def damaging_update(self, state, total, *about):
    after = update(self, state, total, *about)
    if strike("update") == "flip":
        return replace(after, params=flipped(after.params))
    if DIGESTS:
        line = {"step": after.step, "params_sha256": params_sha256(after), "state_sha256": state_sha256(after)}
        with open(DIGESTS, "a") as file:
            file.write(json.dumps(line) + "\n")
    return after


Healer.run, LocalProgram.update = damaging_heal, damaging_update


@dataclass(frozen=True, kw_only=True)
class FaultyConfig(et.Config):
    steps: int = 40
    batch_size: int = 48
    width: int = 32
    bad_sample: int = -1  # this one is not finite, whoever reads it
    raising_sample: int = -1  # this one cannot be read by anybody
    prefetch: int = 0  # a fault in reading data strikes in the step it is planned for
    ballast_gb: int = 0  # makes the state so much larger


class Source:
    """1000 samples of a fixed function."""

    where = "data"

    def __init__(self, where: str, bad_sample: int = -1, raising_sample: int = -1) -> None:
        self.where, self.bad_sample, self.raising_sample = where, bad_sample, raising_sample

    def __len__(self) -> int:
        strike("length")
        return 1000

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        if NOTES_READS and self.where == "data":
            print(f"read {index} after step {committed}", flush=True)
        if index == self.raising_sample:
            raise ValueError(f"sample {index} is broken")
        x = np.random.default_rng(index).standard_normal(8, dtype=np.float32)
        if strike(self.where) == "nan" or index == self.bad_sample:
            x[0] = np.nan
        return {"x": x, "y": np.float32(np.sin(x.sum()))}


def carry_ballast(gigabytes: int) -> optax.GradientTransformation:
    """Arrays of a gigabyte each that other members lack until they are healed: every step changes every number."""

    def init(params):
        return [jax.numpy.arange(2**28, dtype=jax.numpy.uint32) + number for number in range(gigabytes)]

    def update(updates, state, params=None):
        return updates, [array * jax.numpy.uint32(1664525) + jax.numpy.uint32(1013904223) for array in state]

    return optax.GradientTransformation(init, update)


class CarriedKey(NamedTuple):
    key: jax.Array


def carry_key() -> optax.GradientTransformation:
    """A typed random key in the state, which every step changes; updates stay as they are."""

    def init(params):
        return CarriedKey(jax.random.key(0))

    def update(updates, state, params=None):
        return updates, CarriedKey(jax.random.fold_in(state.key, 1))

    return optax.GradientTransformation(init, update)


class Net(nnx.Module):
    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.inner = nnx.Linear(8, width, rngs=rngs)
        self.norm = nnx.BatchNorm(width, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.outer = nnx.Linear(width, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.outer(self.dropout(nnx.relu(self.norm(self.inner(x)))))[:, 0]


class Faulty(et.Trainer):
    config: FaultyConfig

    def model(self, rngs: nnx.Rngs) -> Net:
        strike("start")
        return Net(self.config.width, rngs)

    def optimizer(self) -> optax.GradientTransformation:
        ballast = [carry_ballast(self.config.ballast_gb)] * (self.config.ballast_gb > 0)
        return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(self.schedule()), carry_key(), *ballast)

    def schedule(self) -> optax.Schedule:
        return optax.cosine_decay_schedule(1e-2, 3000)  # not the run's own length: runs of any length compare

    def loss(self, model: Net, batch, rngs: nnx.Rngs) -> jax.Array:
        return (model(batch["x"]) - batch["y"]) ** 2

    def train_data(self) -> Source:
        return Source("data", self.config.bad_sample, self.config.raising_sample)

    def eval_data(self) -> Source:
        return Source("evaluate")

    def on_step(self, event: et.StepCommitted) -> None:
        global committed
        committed = event.step
        time.sleep(PACE_S)
        strike("hook")

    def on_recovered(self, event: et.Recovered) -> None:
        global committed
        committed = event.step


if __name__ == "__main__":
    et.main(Faulty)
