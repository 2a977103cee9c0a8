"""What the roster is told (events) and what it asks for (actions): plain values. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from elastic_train.membership.group import Identity, View

# Events ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AgentJoined:
    """`carried`: the step of each slot's state that the agent holds from before, and `epoch` the newest of them;
    `spare`: how many slots more it could fill."""

    agent: str
    slots: tuple[int, ...]
    carried: Mapping[int, int] = field(default_factory=dict)
    epoch: int = 0
    spare: int = 0


@dataclass(frozen=True)
class AgentLost:
    """The agent's stream ended. Its host may be gone; its workers count as dead, fenced by their node ids."""

    agent: str


@dataclass(frozen=True)
class AgentLeaving:
    """The agent was asked to end; it has asked its members to leave after a commit."""

    agent: str
    reason: str


@dataclass(frozen=True)
class Started:
    """A worker's process is there; `warm`: it was held ready, with everything imported."""

    identity: Identity
    pid: int
    warm: bool = False


@dataclass(frozen=True)
class Hello:
    identity: Identity
    pid: int
    host: str


@dataclass(frozen=True)
class Ready:
    """The worker could join at once. `schema` says what it runs; see `membership.schema`. `start_s`: what its start
    took, in seconds by part."""

    identity: Identity
    schema: Mapping[str, str] = field(default_factory=dict)
    start_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Viewed:
    """A member reports the view it is in now."""

    identity: Identity
    view: View
    step: int


@dataclass(frozen=True)
class Stepped:
    """A worker's committed step count."""

    identity: Identity
    step: int


@dataclass(frozen=True)
class Failed:
    """User code raised on a worker; `fatal` if the worker leaves because of it."""

    identity: Identity
    step: int
    fatal: bool
    startup: bool
    traceback: str


@dataclass(frozen=True)
class Finished:
    identity: Identity
    status: str  # "done", "stopped", "failed" or "gave_up"
    message: str = ""  # why it failed or gave up, if no traceback tells it
    step: int = 0  # completed updates; the last report of progress may be older


@dataclass(frozen=True)
class Silent:
    """The worker's control stream broke or did not answer."""

    identity: Identity
    reason: str


@dataclass(frozen=True)
class Unfit:
    """The worker is connected but of no use: `kind` is "stuck" or "slow"."""

    identity: Identity
    kind: str
    reason: str


@dataclass(frozen=True)
class Exited:
    """The worker's process is gone, for certain. `stuck_at`: the user's innermost frame, if its stacks were dumped."""

    identity: Identity
    exit_code: int
    traceback: str
    stuck_at: str = ""


@dataclass(frozen=True)
class TimerOver:
    """A timer that a `SetTimer` action asked for."""

    name: str


@dataclass(frozen=True)
class StopAsked:
    """A signal or the `Stop` call. `now` on the second one."""

    now: bool
    reason: str


@dataclass(frozen=True)
class DrainAsked:
    """The worker of this slot shall leave, and nobody take its place."""

    slot: int
    reason: str


@dataclass(frozen=True)
class ResizeAsked:
    """The job shall have this many slots."""

    workers: int
    reason: str


WorkerEvent = Started | Hello | Ready | Viewed | Stepped | Failed | Finished | Silent | Unfit | Exited

Event = AgentJoined | AgentLost | AgentLeaving | TimerOver | StopAsked | DrainAsked | ResizeAsked | WorkerEvent

# Actions --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Start:
    """Tell `agent` to start a worker with this identity; with `restore` it begins with the state that the slot's last
    worker left."""

    agent: str
    identity: Identity
    restore: bool = False


@dataclass(frozen=True)
class Kill:
    """Tell `agent` to SIGKILL this worker, after its stacks were dumped to its log if that is asked for; `Exited`
    follows."""

    agent: str
    identity: Identity
    reason: str
    dump_stacks: bool = False


@dataclass(frozen=True)
class Refuse:
    """Tell `agent` why it does not fill these slots."""

    agent: str
    slots: tuple[int, ...]
    reason: str


@dataclass(frozen=True)
class Tombstone:
    """Tell JAX's service that this node is gone. Comes before the `Abort` of the same node."""

    identity: Identity


@dataclass(frozen=True)
class Abort:
    """Tell these nodes that `dead` is dead."""

    dead: Identity
    tell: tuple[int, ...]


@dataclass(frozen=True)
class Announce:
    """Tell these nodes which joiners are ready now; replaces the list before."""

    tell: tuple[int, ...]
    joiners: tuple[Identity, ...]


@dataclass(frozen=True)
class Form:
    """Tell these nodes that they are members of `view`."""

    view: View
    tell: tuple[int, ...]


@dataclass(frozen=True)
class Evict:
    """Tell this connection to exit: it belongs to no current worker."""

    identity: Identity
    reason: str


@dataclass(frozen=True)
class RefuseWorker:
    """Tell this living worker to exit: it runs something else than the others."""

    identity: Identity
    reason: str


@dataclass(frozen=True)
class AskStop:
    """Tell these nodes to agree on a stop after a commit (`now=False`), or to exit (`now=True`)."""

    tell: tuple[int, ...]
    now: bool
    reason: str


@dataclass(frozen=True)
class AskLeave:
    """Tell this member to leave the group after a commit."""

    identity: Identity


@dataclass(frozen=True)
class SetTimer:
    """Send `TimerOver(name)` after `delay_s`; 0 is at once. Setting a name again replaces the timer."""

    name: str
    delay_s: float


@dataclass(frozen=True)
class End:
    """The job is over: end every worker that is left, write the summary, exit."""

    exit_code: int
    status: str  # "done", "stopped", "failed", "gave_up"
    message: str  # one sentence
    traceback: str = ""  # the first one of the user's code, where the job failed


@dataclass(frozen=True)
class NextGeneration:
    """End this coordinator without a word to anybody, and start the next one."""

    reason: str


@dataclass(frozen=True)
class Note:
    """A state transition worth a line in events.jsonl and, if `show`, on the display."""

    event: str
    fields: dict[str, object] = field(default_factory=dict)
    show: str = ""


Action = (
    Start
    | Kill
    | Refuse
    | Tombstone
    | Abort
    | Announce
    | Form
    | Evict
    | RefuseWorker
    | AskStop
    | AskLeave
    | SetTimer
    | End
    | NextGeneration
    | Note
)
