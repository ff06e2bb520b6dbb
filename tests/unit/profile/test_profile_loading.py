"""Profile files: what is read, and the error of each mistake."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fleet_train.errors import ProfileError
from fleet_train.profile import Profile, load_profile
from fleet_train.profile.knobs import GONE

Load = Callable[[str], Profile]


@pytest.fixture
def load(folder: Path) -> Load:
    """Load a profile file with this text, called ``a.yaml`` in the working directory."""

    def load_text(text: str) -> Profile:
        (folder / "a.yaml").write_text(text)
        return load_profile("./a.yaml")

    return load_text


def problems(load: Load, text: str) -> list[str]:
    with pytest.raises(ProfileError) as caught:
        load(text)
    return str(caught.value).split("\n")


def test_a_file_sets_what_it_says_and_is_called_after_itself(load: Load) -> None:
    assert load("num_threads: &two 2\nfetch_frequency: *two\n") == Profile(name="a", num_threads=2, fetch_frequency=2)
    profile = load("nccl_comm_num: 2\nfuse_grad_size_in_MB: 4\ndescription: Two.\n")
    assert (profile.name, profile.description) == ("a", "Two.")
    assert (profile.nccl_comm_num, profile.fuse_grad_size_in_MB) == (2, 4.0)
    assert profile.explicit == {"nccl_comm_num", "fuse_grad_size_in_MB"}
    assert profile.origin("nccl_comm_num") == "a.yaml:1"
    assert profile.origin("fetch_frequency") == "default"


SHARES = "allowed: a list of numbers, one for each rank"
COUNT = "allowed: a whole number, 1 to 16, or auto"
SIZE = "allowed: a number, more than 0 and up to 4096, or auto"
STREAMS = "allowed: one of auto, calc, own"
METHODS = "allowed: one of none, bf16, fp16, int8, int4, powersgd"
OUTER = "allowed: one of none, slowmo, diloco"
SWITCH = "allowed: true or false"
NO_KEY = "is not a key of a profile; to build on another profile, use extends"
DECIMAL = "write a plain decimal number"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nccl_com_num: 2", "nccl_com_num: unknown key; did you mean 'nccl_comm_num'?"),
        ("Fuse-Grad-Size-in-MB: 2", "Fuse-Grad-Size-in-MB: unknown key; did you mean 'fuse_grad_size_in_MB'?"),
        ("no: 2", "no: unknown key"),
        ("dgc_sparsity: 0.9", f"dgc_sparsity: unknown key; {GONE['dgc']}"),
        (
            "collective_stream: graph",
            f"collective_stream: given 'graph'; {STREAMS}; {GONE['graph']}",
        ),
        ("compression_declines: true", f"compression_declines: unknown key; {GONE['compression_declines']}"),
        ("compression: dgc", f"compression: given 'dgc'; {METHODS}; {GONE['dgc']}"),
        ("NCCL_DEBUG: INFO", "NCCL_DEBUG: unknown key; an environment variable goes below 'environment:'"),
        ("nccl_comm_num: 0", f"nccl_comm_num: given 0; {COUNT}"),
        ("nccl_comm_num: '2'", f"nccl_comm_num: given '2' (text); {COUNT}; write 2 without quotes"),
        ("nccl_comm_num: 2.0", f"nccl_comm_num: given 2.0 (a number with decimals); {COUNT}; write 2"),
        ("nccl_comm_num: yes", f"nccl_comm_num: yes is read as a boolean by YAML; {COUNT}"),
        ("nccl_comm_num:", f"nccl_comm_num: has no value; {COUNT}"),
        ("nccl_comm_num: !!python/object/apply:os.getpid []", f"nccl_comm_num: given a list; {COUNT}"),
        ("nccl_comm_num: {a: 2}", f"nccl_comm_num: given a section; {COUNT}"),
        ("nccl_comm_num: 010", f"nccl_comm_num: 010 is read as 8 by YAML; {DECIMAL}"),
        ("fuse_grad_size_in_MB: 1e-3", f"fuse_grad_size_in_MB: given '1e-3' (text); {SIZE}; write 1.0e-3"),
        ("fuse_grad_size_in_MB: .nan", f"fuse_grad_size_in_MB: given nan; {SIZE}"),
        ("fuse_all_reduce_ops: 0", f"fuse_all_reduce_ops: given 0 (a number); {SWITCH}; write false without quotes"),
        ("description: no", 'description: no is read as a boolean by YAML; write "no"'),
        ("outer_optimizer: slomo", f"outer_optimizer: given 'slomo'; {OUTER}; did you mean 'slowmo'?"),
        (
            "recompute_checkpoints: w_0",
            "recompute_checkpoints: given the single value 'w_0'; allowed: a list of texts",
        ),
        ("batch_shares: fast", f"batch_shares: given the single value 'fast'; {SHARES}, equal, or auto"),
        ("batch_shares: [3, fast]", f"batch_shares: given 'fast' (text); {SHARES}"),
        ("batch_shares: 3", f"batch_shares: given 3 (a whole number); {SHARES}, equal, or auto"),
        ("recompute_checkpoints: [no]", 'recompute_checkpoints: no is read as a boolean by YAML; write "no"'),
        ("environment: 3", "environment: given text; allowed: a section of NAME: value lines"),
        ("<<: {nccl_comm_num: 2}", f"<<: {NO_KEY}"),
        ("? [a, b]\n: 1", f"?: {NO_KEY}"),
    ],
)
def test_a_mistake_is_reported_with_its_line(load: Load, line: str, message: str) -> None:
    assert problems(load, f"name: x\n\n{line}\n") == [f"a.yaml:3: {message}"]


@pytest.mark.parametrize(
    ("word", "value"), [("true", True), ("yes", True), ("on", True), ("off", False), ("No", False)]
)
def test_a_boolean_knob_takes_every_boolean_of_yaml(load: Load, word: str, value: bool) -> None:
    assert load(f"fuse_all_reduce_ops: {word}\n").fuse_all_reduce_ops is value


def test_all_problems_of_a_file_are_reported_together_in_order_of_lines(load: Load, refused_knob: str) -> None:
    assert load(f"{refused_knob}: false\n") == Profile(name="a"), "its default"
    text = "nccl_comm_num: 99\nfoo: 1\nfetch_frequency: 'x'\nsync_nccl_allreduce: true\nnccl_comm_num: 2\n"
    assert problems(load, text) == [
        "a.yaml:1: nccl_comm_num: is set again on line 5; keep one of the two",
        "a.yaml:1: nccl_comm_num: given 99; allowed: a whole number, 1 to 16, or auto",
        "a.yaml:2: foo: unknown key",
        "a.yaml:3: fetch_frequency: given 'x' (text); allowed: a whole number, 1 to 1000000",
        "a.yaml:4: sync_nccl_allreduce: given true: not available yet; leave it off: a reason.",
    ]


def without(knob: str, switch: str, now: str, way: str) -> str:
    return f"{knob}: has no effect while {switch} is {now}; set {switch}: {way}, or remove {knob}"


SCHEDULES = "allowed: one of constant, doubling, adaptive"
LOCAL = "use_local_sgd: true\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "fuse_grad_size_in_MB: 8\nfuse_all_reduce_ops: false\n",
            "1: " + without("fuse_grad_size_in_MB", "fuse_all_reduce_ops", "false", "true"),
        ),
        (LOCAL + "outer_lr: 0.7\n", "2: " + without("outer_lr", "outer_optimizer", "none", "slowmo or diloco")),
        (
            LOCAL + "local_sgd_schedule: adaptiv\nlocal_sgd_max_steps: 8\n",
            f"2: local_sgd_schedule: given 'adaptiv'; {SCHEDULES}; did you mean 'adaptive'?",
        ),
        (LOCAL + "local_sgd_schedule: no\nlocal_sgd_max_steps: 8\n", "2: local_sgd_schedule: no is read as a boolean"),
        (
            LOCAL + "local_sgd_steps: 8\nlocal_sgd_overlap_steps: 8\n",
            "3: local_sgd_overlap_steps: 8 is not below local_sgd_steps, 8: an averaging ends before",
        ),
        (
            LOCAL + "local_sgd_steps: 8\nlocal_sgd_overlap_steps: 3\nlocal_sgd_schedule: doubling\n",
            "3: local_sgd_overlap_steps: does not go with local_sgd_schedule: doubling, whose next period",
        ),
        (
            LOCAL + "local_sgd_steps: 8\nlocal_sgd_overlap_steps: 3\nlocal_sgd_momentum: average\n",
            "3: local_sgd_overlap_steps: does not go with local_sgd_momentum: average, which changes",
        ),
        (
            "fuse_grad_size_in_MB: 0.5\nlast_comm_group_size_MB: 2\n",
            "2: last_comm_group_size_MB: 2 is more than fuse_grad_size_in_MB, 0.5, which limits every bucket; use",
        ),
        (
            "num_threads: 3\nenvironment:\n  FLAGS_new_executor_serial_run: 1\n",
            "3: environment.FLAGS_new_executor_serial_run: num_threads: 3 means the opposite (1 is the serial mode",
        ),
    ],
)
def test_contradictory_settings_are_refused(load: Load, text: str, message: str) -> None:
    (said,) = problems(load, text)
    assert said.startswith(f"a.yaml:{message}")


def test_defaults_of_the_outer_optimizer_say_what_happens_without_one_and_it_needs_no_momentum(load: Load) -> None:
    for lines in ("outer_lr: 1\n", "outer_momentum: 0\n", "outer_lr: 1.0\nouter_optimizer: none\n"):
        assert load("use_local_sgd: true\n" + lines) == Profile(name="a", use_local_sgd=True)
    profile = load("use_local_sgd: true\nouter_optimizer: diloco\nouter_lr: 0.5\nouter_momentum: 0\n")
    assert (profile.outer_optimizer, profile.outer_lr, profile.outer_momentum) == ("diloco", 0.5, 0.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a.yaml: is empty; write at least 'description: ...', or give another file"),
        ("\n- a\n", "a.yaml:2: is a list; a profile is a list of 'knob: value' lines"),
        ("word\n", "a.yaml:1: is a single value; a profile is a list of 'knob: value' lines"),
        ("a: 1\n---\nb: 1\n", "a.yaml:2: is not YAML: but found another document (column 1)"),
        ("a: [1\n", "a.yaml:2: is not YAML: expected ',' or ']', but got '<stream end>' (column 1)"),
        ("a: *b\n", "a.yaml:1: is not YAML: found undefined alias (column 4)"),
        ("ok: 1\na: \x07\n", "a.yaml:2: is not YAML: the character U+0007"),
        ("[" * 20_000, "a.yaml: is nested too deeply; a profile is a list of 'knob: value' lines"),
        ("#" * 70_000, "a.yaml: has 70000 bytes, at most 65536 are read. Is this the right file?"),
    ],
)
def test_what_is_no_profile_at_all_is_reported_as_such(load: Load, text: str, message: str) -> None:
    assert problems(load, text) == [message]


def test_text_that_is_not_utf8_is_reported_with_its_line(folder: Path) -> None:
    (folder / "a.yaml").write_bytes(b"name: x\ndescription: \xff\n")
    with pytest.raises(ProfileError, match=r"^a\.yaml:2: is not UTF-8 text"):
        load_profile("./a.yaml")


def test_environment_values_are_the_text_that_was_written(load: Load) -> None:
    written = {"NCCL_DEBUG": "INFO", "NCCL_IB_DISABLE": "true", "A": "0x10", "B": "1e-3", "C": "0.50", "D": "''"}
    text = "environment:\n" + "".join(f"  {name}: {value}\n" for name, value in written.items())
    assert load(text).environment == {**written, "NCCL_IB_DISABLE": "1", "D": ""}


DEVICES = "chooses devices, which differ from rank to rank; give --selected_gpus to the launcher"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("A: no", "A: is read as a boolean by YAML; write it in quotes for the text, or 1 or 0"),
        ("A:", 'A: has no value; for an empty one write ""'),
        ("A: {b: c}", "A: is a section; allowed: one line of text"),
        ("A: 1\n  A: 2", "A: is set again on line 3; keep one of the two"),
        ("PADDLE_TRAINER_ID: s3cret", "PADDLE_TRAINER_ID: the launcher sets this from its own flags and from the clus"),
        ("CUDA_VISIBLE_DEVICES: 0", f"CUDA_VISIBLE_DEVICES: {DEVICES}"),
        ("FLAGS_selected_gpus: 0", f"FLAGS_selected_gpus: {DEVICES}"),
        ("FLAGS_enable_pir_api: 0", "FLAGS_enable_pir_api: the old IR has no host operators, which carry"),
        ("http-proxy: x", "http-proxy: is not a variable name; allowed: capital letters, digits and _, or FLAGS_ and"),
        ("A: |\n    two\n    lines", "A: the value has a line break or a NUL character; allowed: one line of text"),
    ],
)
def test_a_variable_that_may_not_be_set_is_reported_with_its_line(load: Load, line: str, message: str) -> None:
    (said,) = problems(load, f"environment:\n  {line}\n")
    assert said.startswith(f"a.yaml:2: environment.{message}")


def test_a_profile_extends_a_name_and_keeps_where_each_setting_came_from(load: Load) -> None:
    profile = load("extends: one_communicator\nfetch_frequency: 5\n")
    assert (profile.name, profile.nccl_comm_num, profile.fetch_frequency) == ("a", 1, 5)
    assert profile.explicit == {"nccl_comm_num", "fetch_frequency"}
    assert profile.origin("nccl_comm_num").endswith("strategies/one_communicator.yaml:13")
    assert profile.origin("fetch_frequency") == "a.yaml:2"
    assert profile.description == ""


def test_extends_is_seen_from_the_file_that_says_it(folder: Path) -> None:
    (folder / "deep").mkdir()
    (folder / "base.yaml").write_text("num_threads: 2\nenvironment:\n  A: 1\n  B: 1\n")
    (folder / "deep" / "a.yaml").write_text("extends: ../base.yaml\nenvironment:\n  B: 2\n")
    profile = load_profile("deep/a.yaml")
    assert (profile.num_threads, profile.environment) == (2, {"A": "1", "B": "2"})
    assert profile.origin("environment.A") == "base.yaml:3"
    assert profile.origin("environment.B") == "deep/a.yaml:3"


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("extends: diloco\nuse_local_sgd: false\n", {"use_local_sgd"}),
        (
            "extends: diloco\nouter_optimizer: none\n",
            {"use_local_sgd", "local_sgd_is_warm_steps", "local_sgd_steps", "local_sgd_dtype", "outer_optimizer"},
        ),
        (
            "extends: local_sgd_adaptive\nlocal_sgd_schedule: constant\n",
            {"use_local_sgd", "local_sgd_is_warm_steps", "local_sgd_steps", "local_sgd_schedule"},
        ),
    ],
)
def test_choosing_differently_from_the_parent_takes_its_tuning_with_it(load: Load, text: str, left: set[str]) -> None:
    assert load(text).explicit == left | {"fetch_frequency"}


def test_what_goes_with_the_parents_choice_takes_its_own_tuning_with_it(folder: Path, load: Load) -> None:
    (folder / "base.yaml").write_text("fuse_grad_size_in_MB: 4\nnccl_comm_num: 2\n")
    profile = load("extends: ./base.yaml\nfuse_all_reduce_ops: false\n")
    assert profile.explicit == {"fuse_all_reduce_ops", "nccl_comm_num"}
    (folder / "base.yaml").write_text("amp_level: O1\namp_dtype: float16\namp_init_loss_scaling: 128\n")
    assert load("extends: ./base.yaml\namp_level: O0\n").explicit == {"amp_level"}
    assert load("extends: ./base.yaml\namp_dtype: bfloat16\n").explicit == {"amp_level", "amp_dtype"}
    assert load("extends: ./base.yaml\namp_level: O2\n").amp_init_loss_scaling == 128.0
    assert load("extends: diloco\nouter_optimizer: slowmo\n").outer_lr == 0.7


def test_a_mistake_of_extends_is_reported_with_its_line(folder: Path, load: Load) -> None:
    (folder / "b.yaml").write_text("extends: ./a.yaml\n")
    (folder / "base.yaml").write_text("\nnccl_comm_num: 99\n")
    for number in range(20):
        (folder / f"p{number}.yaml").write_text(f"extends: p{number + 1}.yaml\n")
    for parent, said in (
        ("./b.yaml", "b.yaml:1: extends: is circular: a.yaml -> b.yaml -> a.yaml; remove one of these lines"),
        ("a.yaml", "a.yaml:1: extends: is circular: a.yaml -> a.yaml; remove one of these lines"),
        ("p0.yaml", "p14.yaml:1: extends: more than 16 files deep"),
        ("base.yaml", f"base.yaml:2: nccl_comm_num: given 99; {COUNT}"),
    ):
        assert problems(load, f"extends: {parent}\n") == [said]
    (line,) = problems(load, "name: x\nextends: mult_node\n")
    assert line.startswith("a.yaml:2: extends: 'mult_node' is not a profile of the catalogue; did you mean 'multi_n")
    assert load("recompute_checkpoints: [linear_0.w_0, 'b']").recompute_checkpoints == ["linear_0.w_0", "b"]
