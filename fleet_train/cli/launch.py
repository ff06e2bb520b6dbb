"""``fleet_train launch``: start this node's ranks of a job."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fleet_train.cli.on_hosts import on_hosts, words
from fleet_train.cli.options import (
    DASHES_ALLOWED,
    Command,
    NumberRange,
    WholeNumber,
    WholeNumberRange,
    files,
    folders,
    profiles,
    seconds,
    set_option,
)
from fleet_train.cluster.cluster import DEFAULT_JOIN_TIMEOUT_SECONDS, DEFAULT_STARTED_PORT, FAN_IN, parse_nodes
from fleet_train.cluster.engines import CHOICES
from fleet_train.cluster.flight.trace import read_steps
from fleet_train.errors import GUIDE, ClusterError
from fleet_train.launch.request import AUTO, OFF, ON, FaultPolicy, LaunchRequest, parse_devices, read_job_id
from fleet_train.lazy import part_if_there

if TYPE_CHECKING:
    from fleet_train.hosts.job import Where

_EXAMPLES = """
\b
Examples
  # one machine, two processes
  fleet_train launch --nproc_per_node=2 train.py --epochs 3
\b
  # two machines: the same command on each, only --node_ip differs
  fleet_train launch --cluster_node_ips=192.168.1.2,192.168.1.3 \\
      --node_ip=192.168.1.2 --started_port=6170 --selected_gpus=0,1,2,3 \\
      --strategy multi_node --log_dir mylog train.py --epochs 3
\b
  # three machines that ssh reaches: one command, typed once; two processes on pc2
  fleet_train launch --hosts pc1,pc2:2,pc3 --strategy multi_node train.py
\b
  # the same, restarted when a process or machine fails; the script loads its checkpoint
  fleet_train launch --cluster_node_ips=192.168.1.2,192.168.1.3 --max_restarts=3 train.py
\b
  # three machines with 1, 2 and 1 processes
  fleet_train launch --cluster_node_ips=192.168.1.2,192.168.1.3:2,192.168.1.4 train.py
\b
  # two "nodes" on this one machine, to try it out (one command per terminal)
  fleet_train launch --cluster_node_ips=127.0.0.2,127.0.0.3 --node_ip=127.0.0.2 train.py
  fleet_train launch --cluster_node_ips=127.0.0.2,127.0.0.3 --node_ip=127.0.0.3 train.py
\b
  # what would be started, with which settings
  fleet_train launch --dry-run --nproc_per_node=2 train.py
\b
Everything after the script belongs to the script. The output of rank 0 appears here, that of
every process in LOG_DIR/workerlog.N. The exit code is 0, that of the rank that failed first,
or 12 after SIGTERM if the state was saved.
"""


_POLICY = FaultPolicy()

_STOCK_FLAGS = {
    "--master": "the nodes are given by --cluster_node_ips=A,B; the first one is the rendezvous",
    "--rank": "a node's number is the position of its --node_ip in --cluster_node_ips",
    "--max_restart": "it is --max_restarts here, and the default is 0",
    "--elastic_level": "use --max_restarts=N, and --min_nodes=M to continue without a lost node",
    "--elastic_timeout": "use --rejoin_timeout=SECONDS",
    "--print_config": "the launcher's first line says what it starts, and --dry-run all that it sets",
    "--log_level": "each message comes once, from rank 0; --verbose also shows Paddle's start-up messages",
}
_OTHER_LAUNCHERS = {
    "--nnodes --node_rank --master_addr --master_port --rdzv_endpoint --rdzv_backend --rdzv_conf": (
        "with one machine, leave it out; several are listed, and meet at the first one: --cluster_node_ips=A,B "
        "--node_ip=OWN on each, with --started_port=PORT; or, typed once, --hosts A,B"
    ),
    "--rdzv_id": "it is --job_id NAME",
    "--standalone": "leave it out: without a list of machines, the job is one machine's",
    "--local_rank --use_env": "leave it out: in the script, fleet.local_rank() is each rank's own",
    "--module": "it is -m here",
    "-n -np --np --num_proc --num_processes --num_gpus": (
        "on one machine, it is --nproc_per_node=N; on several, --hosts A:2,B:2 has 2 on each"
    ),
    "-H -host -hosts": "it is --hosts A:2,B:2",
    "-f --hostfile -hostfile --machinefile -machinefile": "it is --hosts_file FILE, with lines such as pc2 slots=2",
    "--num_nodes --num_machines": "leave it out: the machines of --cluster_node_ips=A,B or --hosts A,B are counted",
    "-N -ppn -perhost -npernode --npernode": "it is --nproc_per_node=N, the processes of each machine",
    "-x -env -genv": "ranks get your shell's variables; one more is --set environment.NAME=VALUE",
    "--start_timeout": "it is --join_timeout=SECONDS",
    "--min_np --max_np --host_discovery_script": "use --max_restarts=N, and --min_nodes=M to go on with M machines",
    "--network_interface --network_interfaces --nics -iface": (
        "it follows from the machines' addresses; --set environment.GLOO_SOCKET_IFNAME=NAME names another"
    ),
    "-p -i --ssh_port --ssh_identity_file": "write it into ~/.ssh/config, or into --ssh_config FILE",
    "--no_python --role --tee --redirects": (
        "leave it out: it starts Python scripts and modules, and --log_dir has the output of each rank"
    ),
    "--gloo --mpi --mca -mca --bind_to -bind_to --map_by -map_by --tag_output --oversubscribe --allow_run_as_root": (
        "leave it out: it is for mpirun, which can start the ranks without this launcher (docs/engines.md)"
    ),
}
INSTEAD = {flag: text for flags, text in _STOCK_FLAGS.items() for flag in flags.split()} | {
    flag: f"{text} ({GUIDE})" for flags, text in _OTHER_LAUNCHERS.items() for flag in flags.split()
}
"""Flags of paddle.distributed.launch and of other launchers, with ``_`` within a name: what to write here."""


def _instead(typed: str) -> str:
    """What to write for a flag of another launcher, ``-np4`` too; empty if it is none."""
    flag = typed.partition("=")[0]
    glued = re.match(r"(-np?|-N|-H|-x)(?=\d|\w+[:=,])", typed)
    return INSTEAD.get(flag, "") or (INSTEAD[glued[1]] if glued else "")


_VERIFY = "--verify_joint_batch"


class _LaunchCommand(click.Command):
    def _with_steps(self, args: list[str], ctx: click.Context) -> list[str]:
        """Give ``--verify_joint_batch`` its number of steps where the script or another flag follows it: click would
        take that for the number. Raises UsageError for a flag of another launcher."""
        takes_value = {
            name: not each.is_flag for each in self.params if isinstance(each, click.Option) for name in each.opts
        }
        place = 0
        while place < len(args) and args[place].startswith("-") and args[place] != "--":
            name = args[place][:2] + args[place][2:].replace("-", "_")
            if text := _instead(name):
                raise click.UsageError(f"No such option '{args[place].partition('=')[0]}': {text}.", ctx)
            following = args[place + 1 : place + 2]
            if name == _VERIFY and not (following and following[0].isdigit()):
                args = [*args[: place + 1], "1", *args[place + 1 :]]
            place += 1 + takes_value.get(name, False)
        return args

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, self._with_steps(args, ctx))


class _PerNode(WholeNumber):
    """A number of processes; torchrun also takes words here."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value in ("gpu", "auto", "cpu"):
            self.fail(
                f"'{value}': leave it out, which is a process for each GPU, or one without; or a number", param, ctx
            )
        return super().convert(value, param, ctx)


def _seconds(flag: str, kind: NumberRange, default: float, help_text: str) -> Callable[[Command], Command]:
    """An option that takes seconds, with its default in the help."""
    return click.option(flag, type=kind, default=default, metavar="SECONDS", help=f"{help_text} [default: {default:g}]")


def _launch_on_hosts(context: click.Context, where: Where, **flags: Any) -> int:
    from fleet_train.cluster.store.access import SECRET_FILE
    from fleet_train.hosts.job import Command as OnHosts
    from fleet_train.hosts.job import launch
    from fleet_train.launch.prepare import check_program

    request = read_request(**{name: value for name, value in flags.items() if name != "dry_run"})
    if not request.is_module:
        check_program(request)
    files = [each for each in (request.command[0], request.strategy or "") if Path(each).is_file()]
    command = OnHosts("launch", words(context, without={"log_dir", "job_secret_file"}), tuple(files))
    if request.secret_file is not None:
        os.environ[SECRET_FILE] = str(request.secret_file)
    faults = request.faults
    needed = faults.min_nodes if faults.min_nodes and faults.max_restarts else len(where.hosts)
    return launch(command, where, request.log_dir, faults.grace_seconds, needed, flags["dry_run"])


@click.command(
    name="launch",
    cls=_LaunchCommand,
    epilog=_EXAMPLES,
    context_settings=DASHES_ALLOWED,
)
@on_hosts(_launch_on_hosts)
@click.option(
    "--cluster_node_ips",
    "--ips",
    metavar="A,B:2",
    help="All nodes, the same list on each; A:N is a node of N processes. [default: 127.0.0.1]",
)
@click.option(
    "--node_ip", "--host", metavar="A", help="This machine's address in the list. Detected if exactly one is its own."
)
@click.option(
    "--started_port",
    "--start_port",
    type=WholeNumber(),
    metavar="PORT",
    help="First port; rank N of a node uses PORT+N, the job store the next one. [default: "
    f"{DEFAULT_STARTED_PORT}; on one machine alone the first free ones from there]",
)
@click.option(
    "--selected_gpus",
    "--devices",
    "--gpus",
    metavar="0,1",
    help="One process per device. On a CPU build of Paddle: as many processes.",
)
@click.option(
    "--nproc_per_node",
    type=_PerNode(),
    metavar="N",
    help="Processes per node, of nodes without a number in the list. [default: every GPU; 1 without]",
)
@click.option(
    "--strategy",
    metavar="NAME|FILE",
    help="Profile by name (see: profiles) or YAML file; wins over the script's.",
    shell_complete=profiles,
)
@set_option
@click.option(
    "--log_dir",
    type=Path,
    default=Path("log"),
    show_default=True,
    help="Receives workerlog.N.",
    shell_complete=folders,
)
@_seconds(
    "--join_timeout",
    seconds(min_open=True),
    DEFAULT_JOIN_TIMEOUT_SECONDS,
    "How long to wait for the other nodes.",
)
@click.option(
    "--max_restarts",
    type=WholeNumberRange(min=0),
    default=0,
    show_default=True,
    metavar="N",
    help="When a rank or node fails, restart all ranks, at most N times. They get FLEET_TRAIN_ATTEMPT=1, 2, ... "
    "and the script resumes from its last checkpoint, as the reference trainer does.",
)
@click.option(
    "--spares",
    type=click.Choice([AUTO, OFF, ON]),
    default=AUTO,
    show_default=True,
    help="Whether each rank has a spare process, which has imported Paddle and goes on after a failure (160 MB or more "
    "each). auto: with --max_restarts, where memory allows it.",
)
@click.option(
    "--min_nodes",
    type=WholeNumber(),
    metavar="M",
    help="Continue with M or more nodes when a lost one does not come back. [default: all]",
)
@_seconds(
    "--rejoin_timeout",
    seconds(),
    _POLICY.rejoin_timeout_seconds,
    "How long to wait for a lost node before that.",
)
@_seconds(
    "--lost_node_timeout",
    seconds(min=1),
    _POLICY.lost_node_timeout_seconds,
    "A node without a heartbeat for this long is lost.",
)
@_seconds(
    "--grace_seconds",
    seconds(),
    _POLICY.grace_seconds,
    "After SIGTERM, how long ranks may take to save their state.",
)
@click.option(
    "--job_id",
    metavar="NAME",
    help="Name of this job, the same on every node; connections of other jobs are refused. [default: made from the "
    "script, the nodes and the port; or FLEET_TRAIN_JOB_ID]",
)
@click.option(
    "--job_secret_file",
    type=Path,
    shell_complete=files,
    metavar="FILE",
    help="A secret that all nodes share: connections without it are refused, from any address. [default: the "
    "addresses of the node list are accepted; or FLEET_TRAIN_JOB_SECRET]",
)
@click.option(
    "--direct_ranks",
    type=WholeNumberRange(min=0),
    default=FAN_IN,
    show_default=True,
    metavar="N",
    help="A job of more than N ranks connects through a tree of relays, one per node; a smaller one to the leader.",
)
@click.option(
    "--use_paddlecloud", is_flag=True, help="Read nodes and ports from PaddleCloud's or PaddleJob's variables."
)
@click.option(
    "--engine",
    type=click.Choice(CHOICES),
    help="What started the launchers; it gives the nodes if --cluster_node_ips does not. [default: auto; or "
    "FLEET_TRAIN_ENGINE]",
)
@click.option(
    "--verbose", is_flag=True, help="Also show Paddle's start-up messages of rank 0; its log has them anyway."
)
@click.option(
    "--strict",
    is_flag=True,
    help="A script's probable mistakes are errors: ranks that train without each other, on the same samples or with "
    "the same random numbers. [default: a message; or FLEET_TRAIN_STRICT=1]",
)
@click.option(
    _VERIFY,
    type=WholeNumberRange(min=0),
    default=0,
    metavar="[STEPS]",
    help="In the first steps, 1 unless given, compare the gradient of the ranks with that of one process with all "
    "their data, and say how near it is; with --strict a difference is an error.",
)
@click.option(
    "--trace",
    default="",
    metavar="STEPS",
    help="Trace these steps, such as 100-104, into LOG_DIR/trace.N.bin; then: fleet_train timeline LOG_DIR.",
)
@click.option("--dry-run", is_flag=True, help="Check everything, print what would be started, start nothing.")
@click.option("-m", "is_module", is_flag=True, help="Run a module instead of a script, as python -m does.")
@click.argument(
    "program", nargs=-1, type=click.UNPROCESSED, required=True, metavar="SCRIPT [ARGS]...", shell_complete=files
)
def command(**flags: Any) -> None:
    """Start this node's ranks of a job over a list of nodes.

    Run it on every node; or once, with --hosts. It checks the addresses, ports, devices, profile and script, waits for
    the other nodes, starts the processes with the variables that paddle.distributed.launch sets, and monitors them.
    """
    from fleet_train.launch.launcher import run
    from fleet_train.launch.prepare import prepare
    from fleet_train.log import logger

    dry_run = flags.pop("dry_run")
    request = read_request(**flags)
    launch = prepare(request, os.environ)
    for name in launch.environment.kept:
        logger.warning(f"{name} is set in your environment, which overrides the profile's value")
    if dry_run:
        click.echo(launch.dry_run())
        return
    doctor = part_if_there("fleet_train.doctor.report")
    machine = doctor.AfterFailure(launch.node, launch.log_dir).line if doctor else str

    def diagnose(last_lines: Sequence[str]) -> str:
        port = part_if_there("fleet_train.port.published")
        return (port.after_failure(last_lines) if port else "") or machine()

    sys.exit(run(launch, os.environ, diagnose))


def read_request(
    *,
    program: tuple[str, ...],
    cluster_node_ips: str | None,
    node_ip: str | None,
    started_port: int | None,
    selected_gpus: str | None,
    nproc_per_node: int | None,
    join_timeout: float,
    max_restarts: int,
    spares: str,
    min_nodes: int | None,
    rejoin_timeout: float,
    lost_node_timeout: float,
    grace_seconds: float,
    job_id: str | None,
    job_secret_file: Path | None,
    use_paddlecloud: bool,
    engine: str | None,
    **same_names: Any,
) -> LaunchRequest:
    """The launch request of the flags; ``same_names``: those that the request has, too. Raises ClusterError for a text
    that cannot be parsed."""
    if steps := same_names.get("trace"):
        read_steps(steps)
    if node_ip and "," in node_ip:
        raise ClusterError(f"--node_ip={node_ip} (--host): it is this machine's own address; a list is --hosts A,B")
    hosts, counts = parse_nodes(cluster_node_ips) if cluster_node_ips is not None else (None, ())
    ports_per_node = None
    if use_paddlecloud:
        from fleet_train.cluster.kubernetes import read_paddlecloud

        cloud = read_paddlecloud(os.environ)
        hosts, node_ip, started_port = cloud.merged(hosts, node_ip, started_port)
        ports_per_node = cloud.ports_per_node
    return LaunchRequest(
        command=program,
        hosts=hosts,
        counts=counts,
        node_host=node_ip,
        started_port=started_port,
        ports_per_node=ports_per_node,
        selected_gpus=parse_devices(selected_gpus) if selected_gpus is not None else None,
        processes_per_node=nproc_per_node,
        join_timeout_seconds=join_timeout,
        faults=FaultPolicy(max_restarts, min_nodes, rejoin_timeout, lost_node_timeout, grace_seconds, spares),
        job_id=None if job_id is None else read_job_id(job_id),
        engine="none" if use_paddlecloud else engine,
        secret_file=None if job_secret_file is None else job_secret_file.absolute(),
        **same_names,
    )
