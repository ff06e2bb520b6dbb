"""Checks everything that can be checked before a process starts, and builds the launch. Starts nothing."""

from __future__ import annotations

import difflib
import hashlib
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING

import fleet_train
from fleet_train import timeouts
from fleet_train.cluster import network
from fleet_train.cluster.engines import OWN_ALIASES, alone_despite, detect, locate
from fleet_train.cluster.environment import SETTINGS, is_strict
from fleet_train.cluster.partial import PartialCluster, complete
from fleet_train.cluster.started import Started
from fleet_train.cluster.store.access import JOB_ID, SECRET_FILE, Access
from fleet_train.cluster.trained import TRAINED, TRAINED_FILE
from fleet_train.errors import ClusterError, PaddleUnusable
from fleet_train.launch.node import (
    LaunchEnvironment,
    Machine,
    Node,
    build_environment,
    look_around,
    place,
    variables_of_rank,
)
from fleet_train.launch.ports import take_ports
from fleet_train.launch.rendezvous import Facts
from fleet_train.launch.report import counted
from fleet_train.launch.request import ON, FaultPolicy, LaunchRequest, read_job_id
from fleet_train.log import logger

if TYPE_CHECKING:
    from fleet_train.profile import Profile


@dataclass(frozen=True)
class Launch:
    """A checked launch: what ``run`` executes and ``--dry-run`` prints."""

    request: LaunchRequest
    node: Node
    log_dir: Path
    strategy: str | None
    """The profile, by name or absolute path."""
    environment: LaunchEnvironment
    facts: Facts
    access: Access
    strict: bool = False
    settings: str = ""
    """Those of ``--set``, for messages."""
    visible_gpus: tuple[str, ...] | None = None

    def environ_of(self, store: str, number: int, launched: str, environ: Mapping[str, str]) -> dict[str, str]:
        """What the environments of one attempt's ranks have in common: their rendezvous (``host:port/round``), and
        which attempt of which job it is."""
        attempt = str(self.request.restarts + number)
        variables = {"FLEET_TRAIN_STORE": store, "FLEET_TRAIN_ATTEMPT": attempt, "FLEET_TRAIN_LAUNCHED": launched}
        return self.environment.over(environ) | variables

    def variables_of(self, local: int) -> dict[str, str]:
        """Those of one rank of this node."""
        node = self.node
        gpu = None
        if node.devices is not None:
            assert self.visible_gpus is not None
            gpu = self.visible_gpus.index(node.devices[local])
        variables = variables_of_rank(node.cluster(node.ranks[local]), gpu)
        trained = {} if local else {TRAINED: str(self.log_dir / TRAINED_FILE)}
        return variables | {"PADDLE_LOG_DIR": str(self.log_dir)} | trained

    def command(self) -> list[str]:
        """The command of every rank."""
        return [sys.executable, "-u", *(["-m"] if self.request.is_module else []), *self.request.command]

    def summary(self) -> str:
        node = self.node
        nodes = counted(len(node.addresses), "node")
        on = f"devices {','.join(node.devices)}" if node.devices else "CPU"
        ranks = counted(node.world_size, "rank")
        each = f"{nodes} {'with' if node.counts else 'x'} {node.processes_in_words}"
        changed = f" with --set {self.settings}" if self.settings else ""
        return (
            f"{each} = {ranks}; this is {node.describe()}, {on}, interface "
            f"{node.interface or 'unknown'}; profile {self.strategy or 'chosen by the script'}{changed}; "
            f"logs in {self.log_dir}"
        )

    def dry_run(self) -> str:
        ours = self.environment.shown() | self.variables_of(0)
        lines = [
            self.summary(),
            f"job store: {self.node.store_endpoint}, hosted by {self.node.describe(0)}; {self._heard()}",
            self.request.faults.in_words(len(self.node.addresses)),
            f"set for the ranks (here for rank {self.node.ranks[0]}):",
            *(f"  {name}={value}" for name, value in sorted(ours.items())),
        ]
        if self.environment.removed:
            lines.append(f"removed from the environment: {', '.join(sorted(self.environment.removed))}")
        times = counted(self.node.processes, "time")
        return "\n".join([*lines, f"would start, {times}:", f"  {shlex.join(self.command())}"])

    def _heard(self) -> str:
        by = "a shared secret" if self.access.secret else "the addresses of the node list"
        return f"job id {self.access.job}, its connections are authenticated by {by}"


def prepare(request: LaunchRequest, environ: Mapping[str, str], offered: Profile | None = None) -> Launch:
    """Every check, then the launch. Raises FleetTrainError with one line that says what to change.

    ``offered``: instead of the request's strategy, a profile that the ranks get in another way: here it only sets their
    environment.
    """
    request = with_nodes_of_engine(request, environ)
    machine = look_around(environ)
    check_program(request)
    strategy, profile = (None, offered) if offered else load_strategy(request.strategy, request.settings)
    node = place(request, machine)
    _refuse_to_be_alone(node, request, environ)
    node = take_ports(node, request)
    access = access_of_request(request, node, environ)
    check_log_dir(request.log_dir, request.log_flag)
    check_paddle(machine, profile)
    whole = strategy is not None or offered is not None
    environment = build_environment(
        node,
        machine,
        environ,
        request,
        profile={} if profile is None else profile.worker_environment() if whole else profile.environment,
        strategy=strategy,
        import_path=import_path_for_ranks(),
        job_id=access.job,
        hidden=frozenset([*profile.environment, SETTINGS]) if profile and profile.environment else frozenset(),
    )
    check_faults(request.faults, node)
    return Launch(
        request=request,
        node=node,
        log_dir=request.log_dir.absolute(),
        strategy=strategy,
        environment=environment,
        facts=facts_of(node, machine, profile, request),
        access=access,
        strict=request.strict or is_strict(environ),
        settings=shown_settings(request.settings),
        visible_gpus=machine.gpus,
    )


def with_nodes_of_engine(request: LaunchRequest, environ: Mapping[str, str]) -> LaunchRequest:
    """The request completed by what its flags left open: nodes, this one, first port, job id, processes per node.

    Nothing changes if nodes were given, if no engine is found, or if it started one process. Raises ClusterError if
    an engine started several launchers on this node, or gives no usable information.
    """
    if request.hosts is not None or request.engine == "none":
        return request
    started = detect(environ, request.engine)
    if started is None:
        return request
    if (started.local_count or 1) > 1 or started.local_index > 0:
        raise ClusterError(
            f"{started.engine} started {started.local_count or 'several'} launchers on this node; a launcher "
            "starts its node's ranks itself: use one per node (srun --ntasks-per-node=1, mpirun -N 1, horovodrun "
            "-H a:1,b:1) and give --nproc_per_node=N, or start the ranks without it: srun python train.py"
        )
    logger.info(started.in_words())
    request = replace(
        request, processes_per_node=_processes(request, started), restarts=started.restarts, run=started.run
    )
    if started.count == 1:  # no other node has to find it
        return request if request.started_port is not None else replace(request, started_port=started.port)
    if started.hosts and not started.engine.startswith("Slurm"):
        _await_names(started, request.join_timeout_seconds)
        hosts, port, by_name = started.hosts, started.port, True
    else:
        (hosts, port), by_name = _addresses(started, environ, request.join_timeout_seconds), False
    return replace(
        request,
        hosts=hosts,
        node_host=request.node_host or hosts[started.index],
        by_name=by_name,
        started_port=request.started_port if request.started_port is not None else port,
        job_id=request.job_id or environ.get(JOB_ID) or started.job,
    )


def _refuse_to_be_alone(node: Node, request: LaunchRequest, environ: Mapping[str, str]) -> None:
    """Say that the environment speaks of more processes than the job has. Raises ClusterError with ``--strict``."""
    is_chosen = request.engine == "none" or len(node.addresses) > 1
    if not is_chosen and (alone := alone_despite(environ, node.processes)):
        if request.strict or is_strict(environ):
            raise ClusterError(alone)
        logger.warning(alone)


def _processes(request: LaunchRequest, started: Started) -> int | None:
    given = request.processes_per_node is not None or request.selected_gpus is not None
    return request.processes_per_node if given else started.processes


def _addresses(
    started: Started, environ: Mapping[str, str], timeout_seconds: float
) -> tuple[tuple[str, ...], int | None]:
    """(address of every node, first port): from Slurm; otherwise the launchers exchange them."""
    if started.hosts:
        point = locate(started, environ, timeout_seconds)
        return _without_alias(point.hosts, started.index), point.port
    cluster, host = complete(PartialCluster(started), timeout_seconds)
    if host is not None:
        host.release()
    return tuple(rank.host for rank in cluster.ranks), cluster.ranks[0].port + 1


def _await_names(started: Started, timeout_seconds: float) -> None:
    """A pod's name resolves once the pod runs: wait for those of all nodes. Raises ClusterError."""
    deadline, word_at = time.monotonic() + timeout_seconds, time.monotonic() + timeouts.FIRST_WAITING_SECONDS
    unknown = list(started.hosts)
    while True:
        unknown = [host for host in unknown if not network.is_known(host)]
        if not unknown:
            return
        left = deadline - time.monotonic()
        if left <= 0:
            raise ClusterError(
                f"the names {', '.join(unknown[:5])} of {started.engine} are not known here after "
                f"{timeout_seconds:g} s (--join_timeout); its pods need a headless service, with "
                "publishNotReadyAddresses, and have to be running"
            )
        if time.monotonic() > word_at:
            logger.info(f"waiting for the names of {len(unknown)} nodes, such as {unknown[0]} ({left:.0f} s more)")
            word_at = time.monotonic() + timeouts.REPORT_WAITING_SECONDS
        time.sleep(timeouts.RESOLVE_NAMES_SECONDS)


def _without_alias(addresses: tuple[str, ...], own: int) -> tuple[str, ...]:
    """Debian's /etc/hosts maps a machine's own name to 127.0.1.1: take the address that routes to the others."""
    others = [address for index, address in enumerate(addresses) if index != own and address not in OWN_ALIASES]
    if addresses[own] not in OWN_ALIASES or not others:
        return addresses
    address = network.address_towards(others[0]) or addresses[own]
    return (*addresses[:own], address, *addresses[own + 1 :])


def access_of_request(request: LaunchRequest, node: Node, environ: Mapping[str, str]) -> Access:
    """How this job's connections are authenticated. The default job id follows from script, node list and port:
    arguments may differ between nodes."""
    if request.secret_file is not None:
        environ = {**environ, SECRET_FILE: str(request.secret_file)}
    identity = "\0".join([*node.addresses, str(node.started_port)])
    name = Path(request.command[0]).name
    name = re.sub(r"[^A-Za-z0-9._:@-]", "_", name)[:60]
    default = f"{name}-{hashlib.sha256(identity.encode(errors='replace')).hexdigest()[:10]}"
    access = Access.of(environ, node.address, default, warns=True)
    return replace(access, job=request.job_id or read_job_id(access.job, JOB_ID))


def facts_of(node: Node, machine: Machine, profile: Profile | None, request: LaunchRequest) -> Facts:
    """What must be equal on every node, by the names used to report a difference."""
    facts: Facts = {
        "the node list": ",".join(node.every_host),
        "the number of processes per node (--nproc_per_node)": node.processes_in_words,
        "--started_port": node.started_port,
        "--strategy": f"{Path(request.strategy).stem} (digest {profile.digest()[:12]})"
        if profile and request.strategy
        else "none",
        "--set": shown_settings(request.settings) or "none",
        "--max_restarts": request.faults.max_restarts,
        "--min_nodes": request.faults.min_nodes or len(node.addresses),
        "--direct_ranks": request.direct_ranks,
        "--strict": request.strict,
        "--verify_joint_batch": request.verify_joint_batch,
        "--trace": request.trace or "none",
        "the kind of device": "GPU" if node.devices else "CPU",
        "the Python version": ".".join(machine.versions["python"].split(".")[:2]),
        "the fleet_train version": machine.versions["fleet_train"],
        "the Paddle version": machine.versions["paddle"],
    }
    # They are sent as JSON: a tuple would come back as a list and differ from itself.
    assert all(isinstance(value, (str, int)) for value in facts.values()), facts
    return facts


def check_faults(faults: FaultPolicy, node: Node) -> None:
    """Raises ClusterError for settings that contradict each other or the node list."""
    if faults.min_nodes is not None and not 1 <= faults.min_nodes <= len(node.addresses):
        raise ClusterError(
            f"--min_nodes={faults.min_nodes}: the job has {counted(len(node.addresses), 'node')} "
            "(--cluster_node_ips), so give a number from 1 to that"
        )
    if faults.spares == ON and faults.max_restarts == 0:
        raise ClusterError(
            "--spares=1 has no effect without restarts: a spare process goes on after a failure; add --max_restarts=3"
        )
    waits = faults.rejoin_timeout_seconds != FaultPolicy.rejoin_timeout_seconds
    if (faults.min_nodes is not None or waits) and faults.max_restarts == 0:
        flag = "--rejoin_timeout" if faults.min_nodes is None else "--min_nodes"
        raise ClusterError(
            f"{flag} has no effect without restarts: waiting for a lost node, or continuing without it, is a "
            "restart; add --max_restarts=3"
        )


def check_program(request: LaunchRequest) -> None:
    name = request.command[0]
    if request.is_module:
        if PathFinder.find_spec(name.split(".")[0], [str(Path.cwd()), *sys.path]) is None:
            raise ClusterError(f"-m {name}: there is no such module on Python's path or in {Path.cwd()}")
        return
    path = Path(name)
    check_name("the training script ", path)
    if path.is_dir():
        raise ClusterError(f"{name} is a folder; give the Python script that every rank runs")
    if not path.is_file():
        neighbours = [entry.name for entry in path.parent.glob("*.py")] if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, neighbours, n=1)
        hint = f"did you mean {path.parent / near[0]}?" if near else f"the working directory is {Path.cwd()}"
        raise ClusterError(f"the training script {name} does not exist; {hint}")


def check_name(what: str, path: Path) -> None:
    """Raise ClusterError for a path that cannot be looked up: too long, with a NUL, in an inaccessible folder."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no file can have this name"
        raise ClusterError(f"{what}{str(path)[:100]} cannot be used: {reason}; give another path") from None


def check_log_dir(log_dir: Path, flag: str = "--log_dir") -> None:
    check_name(f"{flag}=", log_dir)
    nearest = next(folder for folder in [log_dir.absolute(), *log_dir.absolute().parents] if folder.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise ClusterError(f"{flag}={log_dir}: {nearest} is not a writable folder; choose another")


def load_strategy(asked: str | None, settings: Sequence[str] = ()) -> tuple[str | None, Profile | None]:
    """(profile name or absolute path, profile): ranks may run in a different working directory. Without a name, a
    profile that only has the variables of ``settings``, which every profile of a script gets.
    """
    if asked is None and not settings:
        return None, None
    # pydantic: only when a profile was asked for
    from fleet_train.profile import Profile, load_profile
    from fleet_train.profile.catalogue import NAME, check_assignments, with_assignments

    if asked is None:
        return None, Profile(environment=check_assignments(settings).get("environment", {}))
    profile = with_assignments(load_profile(asked), settings)
    return (asked if NAME.fullmatch(asked) else str(Path(asked).absolute())), profile


def shown_settings(settings: Sequence[str]) -> str:
    """Those of ``--set`` without the values of variables; empty without any."""
    if not settings:
        return ""
    from fleet_train.profile.catalogue import shown_assignments

    return shown_assignments(settings)


def check_paddle(machine: Machine, profile: Profile | None) -> None:
    if machine.versions["paddle"] == "not installed":
        raise PaddleUnusable(
            f"Paddle is not installed for {sys.executable}; install it with: pip install paddlepaddle==3.3.1 (CPU), "
            "or see requirements-gpu.txt"
        )
    if profile is not None and any(name.startswith("FLAGS_") for name in profile.environment):
        from fleet_train.profile import check_flags

        check_flags(profile, known_paddle_flags())


def known_paddle_flags() -> frozenset[str]:
    """Every FLAGS_* name of the installed Paddle. Takes seconds: a separate process imports Paddle."""
    code = "import paddle; print(' '.join(paddle.base.core.globals().keys()))"
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    names = frozenset(name for name in asked.stdout.split() if name.startswith("FLAGS_"))
    if asked.returncode != 0 or not names:
        last = asked.stderr.strip().splitlines()[-1:] or ["no message"]
        raise PaddleUnusable(f"the installed Paddle cannot be imported to read its flags: {last[0]}")
    return names


def import_path_for_ranks() -> Path | None:
    """Where ranks find fleet_train when it runs from a checkout that is not installed; None when it is installed."""
    home = Path(fleet_train.__file__).resolve().parent.parent
    installed = {Path(sysconfig.get_path(kind)).resolve() for kind in ("purelib", "platlib")}
    return None if home in installed else home
