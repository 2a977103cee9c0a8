"""Proves from what its members wrote that a run's barriers kept their promise, or says where they did not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from elastic_train.errors import UsageError
from elastic_train.membership.execution import Enter, Exit
from elastic_train.membership.semantics import find_violation
from elastic_train.telemetry.blocks import DIRECTORY, Barrier, Blocks, Conclusion, Member, read_blocks
from elastic_train.telemetry.json_files import CHANGED, read_lines
from elastic_train.telemetry.run_files import require_run_directory

MAX_SHOWN = 5

_LEDGER = {"step": int, "workers": [int]}


@dataclass(frozen=True)
class BarrierReport:
    """What was found.

    Attributes:
      num_barriers, num_lists: how many barriers there were, and how many lists members got of them.
      num_members: starts of workers that were traced.
      num_commits: blocks that committed a step.
      num_fenced: events of workers that had been declared dead before; they count in no barrier.
      problems: what is wrong, in sentences; empty if all is well.
    """

    num_barriers: int
    num_lists: int
    num_members: int
    num_commits: int
    num_fenced: int
    problems: tuple[str, ...]

    @property
    def proven(self) -> bool:
        return not self.problems and self.num_lists > 0


def verify_barriers(run_dir: Path) -> BarrierReport:
    """Checks a run that has ended, or still goes on.

    - Every member list is valid (`membership.semantics`).
    - Members of one block draw the same conclusion from it: the same verdict, the same next view.
    - A step is committed by one block, by all who were in its list; those are the workers in the ledger.

    Raises:
      UsageError: `run_dir` is no run directory, or one of its files was changed.
    """
    require_run_directory(run_dir)
    # Before the blocks: while the job runs they may know more than the ledger, never less.
    workers = {line["step"]: line["workers"] for line in read_lines(run_dir / "ledger.jsonl", lambda line: _LEDGER)}
    blocks = read_blocks(run_dir)
    barriers = {e.barrier for p in blocks.processes for e in p.events if isinstance(e, Enter)}
    problems = list(_unknown_members(blocks))
    if not problems:
        try:
            violation = find_violation(blocks.processes)
        except ValueError as error:
            raise UsageError(f"{run_dir / DIRECTORY}: no members can have written that: {error}; {CHANGED}") from error
        problems += [str(violation)] if violation is not None else []
    commits = _commits(blocks.conclusions)
    problems += _divergences(blocks.conclusions)
    problems += _commit_problems(commits, workers, blocks.members)
    return BarrierReport(
        num_barriers=len(barriers),
        num_lists=sum(isinstance(e, Exit) for p in blocks.processes for e in p.events),
        num_members=len(blocks.members),
        num_commits=sum(map(len, commits.values())),
        num_fenced=blocks.num_fenced,
        problems=tuple(problems),
    )


def format_barriers(report: BarrierReport) -> str:
    """The report as the command line shows it."""
    if not report.num_members:
        return (
            f"Not proven: there are no {DIRECTORY}/*.jsonl in this run directory. Start the run with "
            "`elastic-train run --trace-blocks`; if it had several hosts, bring the files of all of them together."
        )
    lines = [
        f"{report.num_barriers} barriers gave {report.num_lists} member lists to {report.num_members} workers; "
        f"{report.num_commits} blocks committed a step."
    ]
    if report.num_fenced:
        lines.append(f"{report.num_fenced} events of workers that had been declared dead before are left out.")
    if report.proven:
        lines.append("Proven: every list is valid, and all members drew the same conclusions.")
    elif not report.problems:
        lines.append("Not proven: no worker has got a list yet.")
    else:
        lines += [f"NOT VALID: {problem}" for problem in report.problems[:MAX_SHOWN]]
        if len(report.problems) > MAX_SHOWN:
            lines.append(f"... and {len(report.problems) - MAX_SHOWN} more")
    return "\n".join(lines)


def _unknown_members(blocks: Blocks) -> Iterator[str]:
    """Workers that somebody asked for, and that have written nothing."""
    asked = {name for p in blocks.processes for e in p.events if isinstance(e, Enter) for name in e.asked}
    for member in sorted(set(asked) - blocks.members, key=str):
        yield f"{member} was asked for, and there is no file of it; bring the files of all hosts together."


def _divergences(conclusions: Iterable[Conclusion]) -> Iterator[str]:
    """Blocks whose members disagree. Who is fenced concludes nothing for the others."""
    first: dict[Barrier, Conclusion] = {}
    for conclusion in conclusions:
        if conclusion.verdict == "fenced":
            continue
        other = first.setdefault(conclusion.barrier, conclusion)
        if _meaning(other) != _meaning(conclusion):
            yield (
                f"after {conclusion.barrier} {other.member} concluded {_meaning(other)}, "
                f"{conclusion.member} {_meaning(conclusion)}."
            )


def _meaning(conclusion: Conclusion) -> str:
    step = "" if conclusion.step is None else f" of step {conclusion.step}"
    if conclusion.following is None:
        return f"{conclusion.verdict}{step}"
    epoch, nodes = conclusion.following
    return f"{conclusion.verdict}{step}, then epoch {epoch} of nodes {list(nodes)}"


def _commits(conclusions: Iterable[Conclusion]) -> dict[int, dict[Barrier, set[Member]]]:
    """Per step, the blocks that committed it and who says so."""
    commits: dict[int, dict[Barrier, set[Member]]] = defaultdict(dict)
    for conclusion in conclusions:
        if conclusion.verdict == "commit" and conclusion.step is not None:
            commits[conclusion.step].setdefault(conclusion.barrier, set()).add(conclusion.member)
    return commits


def _commit_problems(
    commits: Mapping[int, Mapping[Barrier, set[Member]]],
    workers: Mapping[int, list[int]],
    members: frozenset[Member],
) -> Iterator[str]:
    slots = {(member.job, member.node): member.slot for member in members}
    for step, barriers in sorted(commits.items()):
        blocks = list(barriers)
        for number, one in enumerate(blocks):
            for other in blocks[number + 1 :]:
                # Steps are taken again only by members that have lost them: nobody was there before.
                if one.job == other.job and set(one.nodes) & set(other.nodes):
                    yield f"step {step} was committed twice: by {one} (nodes {list(one.nodes)}) and by {other}."
        committed = [sorted(slots.get((b.job, node)) or 0 for node in b.nodes) for b in blocks]
        if step in workers and workers[step] not in committed:
            yield f"the ledger says that slots {workers[step]} committed step {step}; the members say {committed}."
    # A record is sent after its conclusion was written. Steps before the first one are those of a run without tracing.
    for step in sorted(set(workers) - set(commits)):
        if commits and step >= min(commits):
            yield f"the ledger has step {step}, and no member concluded that it was committed."
