from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Identity(_message.Message):
    __slots__ = ("slot", "incarnation", "node")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    slot: int
    incarnation: int
    node: int
    def __init__(self, slot: _Optional[int] = ..., incarnation: _Optional[int] = ..., node: _Optional[int] = ...) -> None: ...

class View(_message.Message):
    __slots__ = ("epoch", "members")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    members: _containers.RepeatedCompositeFieldContainer[Identity]
    def __init__(self, epoch: _Optional[int] = ..., members: _Optional[_Iterable[_Union[Identity, _Mapping]]] = ...) -> None: ...

class FromWorker(_message.Message):
    __slots__ = ("hello", "ready", "view", "progress", "failed", "finished", "noted", "saved", "loaded", "set_aside")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    VIEW_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    NOTED_FIELD_NUMBER: _ClassVar[int]
    SAVED_FIELD_NUMBER: _ClassVar[int]
    LOADED_FIELD_NUMBER: _ClassVar[int]
    SET_ASIDE_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    ready: Ready
    view: ViewChanged
    progress: Progress
    failed: Failed
    finished: Finished
    noted: Noted
    saved: Saved
    loaded: Loaded
    set_aside: SetAside
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., ready: _Optional[_Union[Ready, _Mapping]] = ..., view: _Optional[_Union[ViewChanged, _Mapping]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ..., noted: _Optional[_Union[Noted, _Mapping]] = ..., saved: _Optional[_Union[Saved, _Mapping]] = ..., loaded: _Optional[_Union[Loaded, _Mapping]] = ..., set_aside: _Optional[_Union[SetAside, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("identity", "pid", "host", "versions", "generation")
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    identity: Identity
    pid: int
    host: str
    versions: str
    generation: int
    def __init__(self, identity: _Optional[_Union[Identity, _Mapping]] = ..., pid: _Optional[int] = ..., host: _Optional[str] = ..., versions: _Optional[str] = ..., generation: _Optional[int] = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ("schema", "start_s")
    class SchemaEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class StartSEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    SCHEMA_FIELD_NUMBER: _ClassVar[int]
    START_S_FIELD_NUMBER: _ClassVar[int]
    schema: _containers.ScalarMap[str, str]
    start_s: _containers.ScalarMap[str, float]
    def __init__(self, schema: _Optional[_Mapping[str, str]] = ..., start_s: _Optional[_Mapping[str, float]] = ...) -> None: ...

class Noted(_message.Message):
    __slots__ = ("event", "fields", "show")
    EVENT_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    SHOW_FIELD_NUMBER: _ClassVar[int]
    event: str
    fields: str
    show: str
    def __init__(self, event: _Optional[str] = ..., fields: _Optional[str] = ..., show: _Optional[str] = ...) -> None: ...

class ViewChanged(_message.Message):
    __slots__ = ("view", "reason", "gone", "came", "step", "time")
    VIEW_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    CAME_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    view: View
    reason: str
    gone: _containers.RepeatedCompositeFieldContainer[Identity]
    came: _containers.RepeatedCompositeFieldContainer[Identity]
    step: int
    time: float
    def __init__(self, view: _Optional[_Union[View, _Mapping]] = ..., reason: _Optional[str] = ..., gone: _Optional[_Iterable[_Union[Identity, _Mapping]]] = ..., came: _Optional[_Iterable[_Union[Identity, _Mapping]]] = ..., step: _Optional[int] = ..., time: _Optional[float] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("step", "phase", "records", "beats", "work_s", "num_shards", "num_worked_steps")
    STEP_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    BEATS_FIELD_NUMBER: _ClassVar[int]
    WORK_S_FIELD_NUMBER: _ClassVar[int]
    NUM_SHARDS_FIELD_NUMBER: _ClassVar[int]
    NUM_WORKED_STEPS_FIELD_NUMBER: _ClassVar[int]
    step: int
    phase: str
    records: _containers.RepeatedScalarFieldContainer[str]
    beats: int
    work_s: float
    num_shards: int
    num_worked_steps: int
    def __init__(self, step: _Optional[int] = ..., phase: _Optional[str] = ..., records: _Optional[_Iterable[str]] = ..., beats: _Optional[int] = ..., work_s: _Optional[float] = ..., num_shards: _Optional[int] = ..., num_worked_steps: _Optional[int] = ...) -> None: ...

class Failed(_message.Message):
    __slots__ = ("step", "fatal", "startup", "traceback")
    STEP_FIELD_NUMBER: _ClassVar[int]
    FATAL_FIELD_NUMBER: _ClassVar[int]
    STARTUP_FIELD_NUMBER: _ClassVar[int]
    TRACEBACK_FIELD_NUMBER: _ClassVar[int]
    step: int
    fatal: bool
    startup: bool
    traceback: str
    def __init__(self, step: _Optional[int] = ..., fatal: bool = ..., startup: bool = ..., traceback: _Optional[str] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("status", "step", "samples", "params_sha256", "state_sha256", "result", "message")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    PARAMS_SHA256_FIELD_NUMBER: _ClassVar[int]
    STATE_SHA256_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    status: str
    step: int
    samples: int
    params_sha256: str
    state_sha256: str
    result: str
    message: str
    def __init__(self, status: _Optional[str] = ..., step: _Optional[int] = ..., samples: _Optional[int] = ..., params_sha256: _Optional[str] = ..., state_sha256: _Optional[str] = ..., result: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class Saved(_message.Message):
    __slots__ = ("step", "json")
    STEP_FIELD_NUMBER: _ClassVar[int]
    JSON_FIELD_NUMBER: _ClassVar[int]
    step: int
    json: str
    def __init__(self, step: _Optional[int] = ..., json: _Optional[str] = ...) -> None: ...

class Loaded(_message.Message):
    __slots__ = ("step", "samples", "path", "seconds")
    STEP_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    step: int
    samples: int
    path: str
    seconds: float
    def __init__(self, step: _Optional[int] = ..., samples: _Optional[int] = ..., path: _Optional[str] = ..., seconds: _Optional[float] = ...) -> None: ...

class SetAside(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class ToWorker(_message.Message):
    __slots__ = ("welcome", "candidates", "form", "abort", "evict", "stop", "ack", "save_state", "save_asked", "leave", "expect")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    FORM_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    EVICT_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    SAVE_STATE_FIELD_NUMBER: _ClassVar[int]
    SAVE_ASKED_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    EXPECT_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    candidates: Candidates
    form: Form
    abort: Abort
    evict: Evict
    stop: Stop
    ack: Ack
    save_state: SaveState
    save_asked: SaveAsked
    leave: Leave
    expect: Expect
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., candidates: _Optional[_Union[Candidates, _Mapping]] = ..., form: _Optional[_Union[Form, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ..., evict: _Optional[_Union[Evict, _Mapping]] = ..., stop: _Optional[_Union[Stop, _Mapping]] = ..., ack: _Optional[_Union[Ack, _Mapping]] = ..., save_state: _Optional[_Union[SaveState, _Mapping]] = ..., save_asked: _Optional[_Union[SaveAsked, _Mapping]] = ..., leave: _Optional[_Union[Leave, _Mapping]] = ..., expect: _Optional[_Union[Expect, _Mapping]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("report_interval_s", "save_state", "save_asked")
    REPORT_INTERVAL_S_FIELD_NUMBER: _ClassVar[int]
    SAVE_STATE_FIELD_NUMBER: _ClassVar[int]
    SAVE_ASKED_FIELD_NUMBER: _ClassVar[int]
    report_interval_s: float
    save_state: SaveState
    save_asked: SaveAsked
    def __init__(self, report_interval_s: _Optional[float] = ..., save_state: _Optional[_Union[SaveState, _Mapping]] = ..., save_asked: _Optional[_Union[SaveAsked, _Mapping]] = ...) -> None: ...

class SaveState(_message.Message):
    __slots__ = ("saved_step", "ended_step", "answered", "has_checkpoints")
    SAVED_STEP_FIELD_NUMBER: _ClassVar[int]
    ENDED_STEP_FIELD_NUMBER: _ClassVar[int]
    ANSWERED_FIELD_NUMBER: _ClassVar[int]
    HAS_CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    saved_step: int
    ended_step: int
    answered: int
    has_checkpoints: bool
    def __init__(self, saved_step: _Optional[int] = ..., ended_step: _Optional[int] = ..., answered: _Optional[int] = ..., has_checkpoints: bool = ...) -> None: ...

class SaveAsked(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class Leave(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Candidates(_message.Message):
    __slots__ = ("joiners",)
    JOINERS_FIELD_NUMBER: _ClassVar[int]
    joiners: _containers.RepeatedCompositeFieldContainer[Identity]
    def __init__(self, joiners: _Optional[_Iterable[_Union[Identity, _Mapping]]] = ...) -> None: ...

class Expect(_message.Message):
    __slots__ = ("view",)
    VIEW_FIELD_NUMBER: _ClassVar[int]
    view: View
    def __init__(self, view: _Optional[_Union[View, _Mapping]] = ...) -> None: ...

class Form(_message.Message):
    __slots__ = ("view",)
    VIEW_FIELD_NUMBER: _ClassVar[int]
    view: View
    def __init__(self, view: _Optional[_Union[View, _Mapping]] = ...) -> None: ...

class Abort(_message.Message):
    __slots__ = ("nodes",)
    NODES_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, nodes: _Optional[_Iterable[int]] = ...) -> None: ...

class Evict(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Stop(_message.Message):
    __slots__ = ("now", "reason")
    NOW_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    now: bool
    reason: str
    def __init__(self, now: bool = ..., reason: _Optional[str] = ...) -> None: ...

class Ack(_message.Message):
    __slots__ = ("step",)
    STEP_FIELD_NUMBER: _ClassVar[int]
    step: int
    def __init__(self, step: _Optional[int] = ...) -> None: ...

class FromAgent(_message.Message):
    __slots__ = ("hello", "started", "exited", "leaving")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    EXITED_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    hello: AgentHello
    started: Started
    exited: Exited
    leaving: AgentLeaving
    def __init__(self, hello: _Optional[_Union[AgentHello, _Mapping]] = ..., started: _Optional[_Union[Started, _Mapping]] = ..., exited: _Optional[_Union[Exited, _Mapping]] = ..., leaving: _Optional[_Union[AgentLeaving, _Mapping]] = ...) -> None: ...

class AgentHello(_message.Message):
    __slots__ = ("host", "slots", "id", "carried", "spare")
    HOST_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    CARRIED_FIELD_NUMBER: _ClassVar[int]
    SPARE_FIELD_NUMBER: _ClassVar[int]
    host: str
    slots: _containers.RepeatedScalarFieldContainer[int]
    id: str
    carried: _containers.RepeatedCompositeFieldContainer[CarriedState]
    spare: int
    def __init__(self, host: _Optional[str] = ..., slots: _Optional[_Iterable[int]] = ..., id: _Optional[str] = ..., carried: _Optional[_Iterable[_Union[CarriedState, _Mapping]]] = ..., spare: _Optional[int] = ...) -> None: ...

class CarriedState(_message.Message):
    __slots__ = ("slot", "step", "epoch")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    slot: int
    step: int
    epoch: int
    def __init__(self, slot: _Optional[int] = ..., step: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class AgentLeaving(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Started(_message.Message):
    __slots__ = ("identity", "pid", "warm")
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    WARM_FIELD_NUMBER: _ClassVar[int]
    identity: Identity
    pid: int
    warm: bool
    def __init__(self, identity: _Optional[_Union[Identity, _Mapping]] = ..., pid: _Optional[int] = ..., warm: bool = ...) -> None: ...

class Exited(_message.Message):
    __slots__ = ("identity", "exit_code", "traceback", "time", "stuck_at")
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    TRACEBACK_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    STUCK_AT_FIELD_NUMBER: _ClassVar[int]
    identity: Identity
    exit_code: int
    traceback: str
    time: float
    stuck_at: str
    def __init__(self, identity: _Optional[_Union[Identity, _Mapping]] = ..., exit_code: _Optional[int] = ..., traceback: _Optional[str] = ..., time: _Optional[float] = ..., stuck_at: _Optional[str] = ...) -> None: ...

class ToAgent(_message.Message):
    __slots__ = ("start", "kill", "shutdown", "welcome", "refused")
    START_FIELD_NUMBER: _ClassVar[int]
    KILL_FIELD_NUMBER: _ClassVar[int]
    SHUTDOWN_FIELD_NUMBER: _ClassVar[int]
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    start: StartWorker
    kill: KillWorker
    shutdown: Shutdown
    welcome: AgentWelcome
    refused: SlotsRefused
    def __init__(self, start: _Optional[_Union[StartWorker, _Mapping]] = ..., kill: _Optional[_Union[KillWorker, _Mapping]] = ..., shutdown: _Optional[_Union[Shutdown, _Mapping]] = ..., welcome: _Optional[_Union[AgentWelcome, _Mapping]] = ..., refused: _Optional[_Union[SlotsRefused, _Mapping]] = ...) -> None: ...

class SlotsRefused(_message.Message):
    __slots__ = ("slots", "reason")
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    slots: _containers.RepeatedScalarFieldContainer[int]
    reason: str
    def __init__(self, slots: _Optional[_Iterable[int]] = ..., reason: _Optional[str] = ...) -> None: ...

class AgentWelcome(_message.Message):
    __slots__ = ("jax_address", "num_nodes", "jax_tls", "generation")
    JAX_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NUM_NODES_FIELD_NUMBER: _ClassVar[int]
    JAX_TLS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    jax_address: str
    num_nodes: int
    jax_tls: bool
    generation: int
    def __init__(self, jax_address: _Optional[str] = ..., num_nodes: _Optional[int] = ..., jax_tls: bool = ..., generation: _Optional[int] = ...) -> None: ...

class StartWorker(_message.Message):
    __slots__ = ("identity", "restore")
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    RESTORE_FIELD_NUMBER: _ClassVar[int]
    identity: Identity
    restore: bool
    def __init__(self, identity: _Optional[_Union[Identity, _Mapping]] = ..., restore: bool = ...) -> None: ...

class KillWorker(_message.Message):
    __slots__ = ("identity", "reason", "dump_stacks")
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DUMP_STACKS_FIELD_NUMBER: _ClassVar[int]
    identity: Identity
    reason: str
    dump_stacks: bool
    def __init__(self, identity: _Optional[_Union[Identity, _Mapping]] = ..., reason: _Optional[str] = ..., dump_stacks: bool = ...) -> None: ...

class Shutdown(_message.Message):
    __slots__ = ("exit_code", "reason")
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    exit_code: int
    reason: str
    def __init__(self, exit_code: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("json",)
    JSON_FIELD_NUMBER: _ClassVar[int]
    json: str
    def __init__(self, json: _Optional[str] = ...) -> None: ...

class StopRequest(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class StopReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SaveRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SaveReply(_message.Message):
    __slots__ = ("step", "path", "error")
    STEP_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    step: int
    path: str
    error: str
    def __init__(self, step: _Optional[int] = ..., path: _Optional[str] = ..., error: _Optional[str] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("slot", "reason")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    slot: int
    reason: str
    def __init__(self, slot: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class DrainReply(_message.Message):
    __slots__ = ("refusal",)
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    refusal: str
    def __init__(self, refusal: _Optional[str] = ...) -> None: ...

class ResizeRequest(_message.Message):
    __slots__ = ("workers", "reason")
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    workers: int
    reason: str
    def __init__(self, workers: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class ResizeReply(_message.Message):
    __slots__ = ("refusal",)
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    refusal: str
    def __init__(self, refusal: _Optional[str] = ...) -> None: ...
